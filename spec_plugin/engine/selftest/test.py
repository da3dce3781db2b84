"""The start-up self-test: proves on the very engine that will roll out that its samples and log-probs are the target's.

Law 2 asks for it because real engines have sampled wrongly without a word. Plain and speculating requests run side by side
in the same batches (``spec_plugin.engine.schedule.scheduler``) and must be alike:

``greedy``      at temperature 0 the same tokens; a difference is a tie when the plain request's own log-probs of the two
                tokens are closer than rounding explains, or than what plain requests show among themselves in batches of
                other shapes explains; and it counts only if it shows again;
``states``      where the target keeps recurrent states, the same of long requests that share prefixes, arrive while others
                run and are cut (``spec_plugin.engine.selftest.states``);
``finite``      no log-prob is NaN or infinite, in either arm;
``samples``     at the run's own sampling options, equal distributions by exact tests (``spec_plugin.engine.selftest.stats``): of
                token counts between the arms, and of the speculating arm against its stated log-probs;
``logprobs``    the stated log-probs agree with a teacher-forced recomputation: by the engine itself, as plain requests of one
                token that end in the prefix (its ``prompt_logprobs`` are no evidence, vLLM issue 53488), or by ``score``;
``break-even``  not a test: what a verification step costs against a plain step, for the controller (law 7).

Chance of rejecting a correct engine: ``alpha``, shared by the two tests under ``samples``. The other checks have tolerances
for rounding, not error levels; with noise of 0.02 to 0.2 nats on every logit, rounded to bfloat16 and not, ``greedy`` failed none
of 160,000 simulated engines. Tolerance in nats: max(1e-3, 32 * eps of the dtype). Logits of language models are about 16
to 32, where neighbouring numbers are 16 to 32 eps / 2 apart: the tolerance is two such steps, 0.25 for bfloat16, 0.031 for
float16; float32 gets a floor of 1e-3 for sums in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.engine.async_llm import AsyncLLM

from spec_plugin.engine.schedule.counters import read_spec_counters
from spec_plugin.engine.schedule.scheduler import pause_idle_draft, schedule_state, set_schedule, take_steps
from spec_plugin.engine.selftest.probe import Probe, calibrate, gather_or_cancel
from spec_plugin.engine.selftest.states import keeps_states, states_checks
from spec_plugin.engine.selftest.verdicts import (
    LEAST_SAMPLES,
    Sampled,
    counts_check,
    evidence_check,
    finite_check,
    greedy_check,
    greedy_limit,
    greedy_noise,
    logprob_check,
    not_stated,
    path_check,
    spread,
)
from spec_plugin.events import Check, SelfTestReport, StepTiming

#: ``score(sequences)[i][j]`` is the log-prob of token j + 1 of sequence i, given those before it, at the run's sampling options
Score = Callable[[list[list[int]]], list[list[float]]]

GREEDY_TOKENS = 24
SAMPLE_PROMPTS = 4  # few prompts, so that many samples share a context
MOST_SAMPLES = 256  # per prompt and arm
MOST_CHEAP_SAMPLES, CHEAP_S = 1024, 7.5  # and so many, as far as they take no more seconds than that
SCORED = 128  # (sequence, position) pairs scored per arm, if there is time
LEAST_SCORED = 32  # in any case
MOST_AT_ONCE = 256  # requests: the sampler's memory, with the log-probs of all of them, is nobody's budget
SAMPLES_UNTIL = 0.55  # share of the time after which no round of samples is begun; the rest is for the last checks
SCORED_UNTIL = 0.75  # and after which no more pairs are scored
CALIBRATED_FOR = 0.4  # share of the time in which batch sizes may be calibrated in any case
_QUESTIONS = ("12+34=", "What is 7 times 8?", "Name three colours.", "987+654=")


def default_prompts(
    vocab_size: int, n: int = 8, length: int = 16, seed: int = 0, avoid: Sequence[int] = ()
) -> list[list[int]]:
    """Prompts of random tokens, for adapters that have no real ones at hand (real ones are sharper, so more sensitive)."""
    rng, banned = random.Random(seed), set(avoid)
    allowed = [t for t in range(vocab_size) if t not in banned]
    return [[rng.choice(allowed) for _ in range(length)] for _ in range(n)]


def questions_and_noise(tokenizer: Any, vocab_size: int, seed: int) -> list[list[int]]:
    """Short questions, on which a policy is surer than on noise, and random tokens, on which it is not."""
    noise = default_prompts(vocab_size, seed=seed)
    if tokenizer is None:
        return noise
    asked = [tokenizer(text)["input_ids"] for text in _QUESTIONS]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in _QUESTIONS]
        asked = [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    return [prompt for pair in zip(asked, noise, strict=False) for prompt in pair]


def tolerance(dtype: torch.dtype) -> float:
    """Difference of two log-probs in nats that rounding explains, see the module's docstring."""
    return max(1e-3, 32 * float(torch.finfo(dtype).eps))


async def run_self_test(
    engine: AsyncLLM,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    k: int,
    vocab_size: int,
    alpha: float,
    seconds: float,
    limit: float | None = None,
    score: Score | None = None,
    max_num_seqs: int,
    whole: bool = False,
    adapter: Any = None,
) -> SelfTestReport:
    """Test a running engine; never raises for what the engine does, every trouble is a failed check.

    Args:
        engine: built with ``scheduler_cls=SCHEDULER`` and a dynamic schedule; idle.
        prompts: token ids, a few short prompts; the first four are sampled from.
        sampling: the run's own ``temperature``, ``top_p``, ``top_k``, …
        k: tokens drafted per step while testing.
        vocab_size: of the target.
        alpha: chance of rejecting a correct engine.
        seconds: in which as much is tested as fits, break-even included; where that is less than the least that proves
            anything, the test takes longer.
        limit: hard limit in seconds; none: ``seconds``.
        score: the trainer's own teacher-forced log-probs, used beside the engine's.
        max_num_seqs: the engine's.
        whole: can only 0 and k tokens be drafted.
        adapter: vLLM's LoRARequest that the run's own requests come with, if they do.
    """
    limit = seconds if limit is None else limit
    test = _SelfTest(engine, prompts, sampling, k, vocab_size, alpha, seconds, limit, score, max_num_seqs)
    test.probe.adapter = adapter
    test.timed = (0, k) if whole else tuple(dict.fromkeys((0, 1, min(3, k), k)))
    return await test.run()


class _SelfTest:
    timed: Sequence[int]  # tokens per step of which it is measured what they cost

    def __init__(
        self,
        engine: AsyncLLM,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        k: int,
        vocab_size: int,
        alpha: float,
        seconds: float,
        limit: float,
        score: Score | None,
        max_num_seqs: int,
    ) -> None:
        if not sampling.get("temperature", 1.0):  # a greedy run: its distribution is what `greedy` tests
            sampling = {**sampling, "temperature": 1.0}
        self.engine, self.prompts, self.k = engine, [list(p) for p in prompts], k
        self.vocab_size, self.alpha, self.score = vocab_size, alpha, score
        self.begin = time.perf_counter()
        self.seconds, self.limit = seconds, limit
        self.probe = Probe(engine, sampling, min(max_num_seqs, MOST_AT_ONCE))
        self.tolerance = tolerance(engine.vllm_config.model_config.dtype)
        self.checks: list[Check] = []
        self.steps: tuple[StepTiming, ...] = ()
        self.spec: list[Sampled] = []
        self.plain: list[Sampled] = []

    async def run(self) -> SelfTestReport:
        """All checks in order; the schedule and the prefix cache are left as if nothing had happened."""
        table: list[int] | None = None

        async def prepare() -> None:
            nonlocal table
            table = (await schedule_state(self.engine))["table"]
            if table is not None:
                await set_schedule(self.engine, [self.k] * len(table))

        if await self._guarded("engine", prepare):
            await self._guarded("greedy", self._greedy)
            if keeps_states(self.engine.vllm_config):
                await self._guarded("states", self._states)
            await self._guarded("samples", self._sample)
            await self._guarded("logprobs", self._logprobs)
            if table is not None:
                await self._calibrate(len(table))
        await self._restore(table)
        return SelfTestReport(tuple(self.checks), time.perf_counter() - self.begin, self.steps)

    async def _guarded(self, name: str, stage: Callable[[], Awaitable[None]]) -> bool:
        left = self.begin + self.limit - time.perf_counter()
        try:
            await asyncio.wait_for(stage(), max(0.01, left))
        except (asyncio.TimeoutError, TimeoutError):
            reason, late = f"not finished within the time limit of {self.limit:g} s", True
        except Exception as error:  # whatever it is, the engine is not proven
            reason, late = f"{type(error).__name__}: {error}", False
        else:
            return True
        self.checks.append(Check(name, False, reason, out_of_time=late))
        return False

    async def _restore(self, table: list[int] | None) -> None:
        async def restore() -> None:
            if table is not None:
                await pause_idle_draft(self.engine, [self.k])  # not paused, as it was
                await set_schedule(self.engine, table)
            await self.engine.reset_prefix_cache()

        try:
            await asyncio.wait_for(restore(), 10.0)
        except Exception as error:
            self.checks.append(Check("restore", False, f"{type(error).__name__}: {error}"))

    async def _batch(
        self, prompts: Sequence[tuple[int, list[int]]], tokens: int, **options: Any
    ) -> tuple[list[Sampled], ...]:
        """The same prompts in both arms, side by side: (speculating, plain)."""
        params = {plain: self.probe.params(tokens, plain, **options) for plain in (False, True)}
        work = [self.probe.sample(i, p, params[plain]) for i, p in prompts for plain in (False, True)]
        results = await gather_or_cancel(work)
        return results[0::2], results[1::2]

    async def _greedy(self) -> None:
        chosen = list(enumerate(self.prompts))
        options = {"temperature": 0.0, "logprobs": self.probe.top}
        spec, plain = await self._batch(chosen, GREEDY_TOKENS, **options)
        check = greedy_check(spec, plain, self.tolerance)
        if not check.passed:  # how far do plain requests differ among themselves, in batches of other shapes
            params = self.probe.params(GREEDY_TOKENS, True, **options)
            alone = [
                await self._in_groups([self.probe.sample(i, p, params) for i, p in chosen], size)
                for size in (len(chosen), 2)
            ]
            noise = [d for a, b in itertools.combinations([plain, *alone], 2) for d in greedy_noise(a, b)]
            limit = greedy_limit(noise, self.tolerance)
            check = greedy_check(spec, plain, limit)
            if not check.passed:  # once more, in other places of the batch
                spec, plain = await self._batch(chosen[::-1], GREEDY_TOKENS, **options)
                again = greedy_check(spec, plain, limit)
                check = again if again.passed else check
        self.checks.append(check)

    async def _states(self) -> None:
        self.checks += await states_checks(self.probe, self.engine, self.prompts, self.tolerance)
        await self.engine.reset_prefix_cache()

    @staticmethod
    async def _in_groups(work: Sequence[Coroutine[Any, Any, Sampled]], size: int) -> list[Sampled]:
        """So many at a time."""
        return [s for i in range(0, len(work), size) for s in await gather_or_cancel(work[i : i + size])]

    async def _sample(self) -> None:
        chosen = list(enumerate(self.prompts[:SAMPLE_PROMPTS]))
        tokens = 2 * (self.k + 1) + 1  # two whole verification rounds after the first token
        repeat = max(1, self.probe.max_num_seqs // (2 * len(chosen)))
        before = read_spec_counters()
        for _ in range(2):  # cold, then timed; not used, so that the number of samples is fixed before they are seen
            begin = time.perf_counter()
            await self._batch(chosen * repeat, tokens, logprobs=self.probe.top)
        now, until = time.perf_counter(), self.begin + SAMPLES_UNTIL * self.seconds
        least = math.ceil(LEAST_SAMPLES / (repeat * len(chosen)))
        rounds = max(least, min(math.ceil(MOST_SAMPLES / repeat), int(0.8 * (until - now) / (now - begin))))
        cheap = int(min(CHEAP_S, 0.8 * (until - now)) / (now - begin))
        rounds = max(rounds, min(math.ceil(MOST_CHEAP_SAMPLES / repeat), cheap))
        for i in range(rounds):
            if i >= least and time.perf_counter() > until:
                break
            spec, plain = await self._batch(chosen * repeat, tokens, logprobs=self.probe.top)
            self.spec += spec
            self.plain += plain
        self.checks.append(finite_check(self.spec, self.plain))
        self.checks.append(counts_check(self.spec, self.plain, self.alpha / 2))
        if self._states_what_it_samples():
            self.checks.append(evidence_check(self.spec, self.plain, self.vocab_size, self.alpha / 2))
        else:
            self.checks.append(not_stated(self.probe.logprobs_mode, self.probe.sampling))
        self.checks.append(path_check(before, read_spec_counters()))

    def _states_what_it_samples(self) -> bool:
        """Are the stated log-probs those of the distribution that is sampled: processed ones, or nothing to process."""
        s = self.probe.sampling
        raw = s.get("temperature", 1.0) == 1.0 and s.get("top_p", 1.0) == 1.0 and s.get("top_k", 0) in (0, -1)
        only = set(s) <= {"temperature", "top_p", "top_k"}
        mode = self.probe.logprobs_mode
        return self.probe.top > 0 and (mode == "processed_logprobs" or (mode == "raw_logprobs" and raw and only))

    async def _logprobs(self) -> None:
        if not self.spec:
            return
        await self.engine.reset_prefix_cache()  # the recomputation must not read what speculation wrote
        pairs = list(zip(spread(self.spec, SCORED), spread(self.plain, SCORED), strict=False))
        random.Random(0).shuffle(pairs)  # so that the first ones are spread too
        spec: list[float | None] = []
        plain: list[float | None] = []
        while len(spec) < len(pairs):
            if len(spec) >= LEAST_SCORED and time.perf_counter() > self.begin + SCORED_UNTIL * self.seconds:
                break
            some = pairs[len(spec) : len(spec) + max(1, self.probe.max_num_seqs // 2)]
            found = await gather_or_cancel([self._rescore(s, t) for both in some for s, t in both])
            spec += found[0::2]
            plain += found[1::2]
        known = [[d for d in arm if d is not None] for arm in (spec, plain)]
        self.checks.append(logprob_check("logprobs", known[0], known[1], self.tolerance))
        if self.score is not None:
            both = [await self._by_trainer(arm, self.score) for arm in (self.spec[:8], self.plain[:8])]
            self.checks.append(logprob_check("logprobs: trainer", both[0], both[1], self.tolerance))

    async def _rescore(self, sampled: Sampled, t: int) -> float | None:
        """|stated - recomputed| for token t; a token that is not among the most likely is at most as likely as the last."""
        prompt = [*self.prompts[sampled.prompt], *sampled.tokens[:t]]
        least = max(0, self.probe.sampling.get("min_tokens", 0) - t)  # t of them are part of the prompt now
        params = self.probe.params(1, plain=True, logprobs=self.probe.top, min_tokens=least)
        again = await self.probe.sample(0, prompt, params)
        stated, found = sampled.logprobs[t], np.flatnonzero(again.top_ids[0] == sampled.tokens[t])
        if found.size:
            return abs(float(stated - again.top[0, found[0]]))
        if again.tokens[0] == sampled.tokens[t]:
            return abs(float(stated - again.logprobs[0]))
        excess = float(stated - again.top[0, -1]) if self.probe.top else 0.0
        return excess if excess > 4 * self.tolerance or math.isnan(excess) else None

    async def _by_trainer(self, arm: Sequence[Sampled], score: Score) -> list[float]:
        sequences = [[*self.prompts[s.prompt], *s.tokens] for s in arm]
        scored = await asyncio.to_thread(score, sequences)
        pairs = zip(arm, scored, strict=True)
        return [abs(a - b) for s, row in pairs for a, b in zip(s.logprobs.tolist(), row[-len(s.tokens) :], strict=True)]

    async def _calibrate(self, entries: int) -> None:
        now = time.perf_counter()
        deadline = max(self.begin + 0.9 * self.seconds, now + CALIBRATED_FOR * self.seconds)
        work = calibrate(self.probe, self.prompts, self.timed, entries, deadline)
        try:
            await take_steps(self.engine)  # those of the checks: another k for each half of a batch
            await asyncio.wait_for(work, max(0.01, min(self.begin + self.limit, deadline + self.seconds) - now))
        except (asyncio.TimeoutError, TimeoutError):
            pass  # what was measured until here is kept
        except Exception as error:
            self.checks.append(Check("break-even", False, f"{type(error).__name__}: {error}"))
            return
        finally:
            with contextlib.suppress(Exception):  # an engine that is gone: its checks say so
                self.steps = await take_steps(self.engine)
        measured = SelfTestReport((), 0.0, self.steps).break_even
        found = ", ".join(f"{b}: {v:.2f}" for b, v in measured.items()) or "nothing measured in time"
        self.checks.append(Check("break-even", True, f"batch size: acceptance length: {found}"))
