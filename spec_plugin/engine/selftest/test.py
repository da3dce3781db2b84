"""The start-up self-test: proves on the very engine that will roll out that its samples and log-probs are the target's.

Law 2 asks for it because real engines have sampled wrongly without a word. Plain and speculating requests run side by side
in the same batches (``spec_plugin.engine.schedule.plain``) and must be alike:

``greedy``      at temperature 0 the same tokens; a difference is a tie when the plain request's own log-probs of the two
                tokens are closer than rounding explains, or than what plain requests show among themselves in batches of
                other shapes explains; and it counts only if it shows again;
``states``      where the target keeps recurrent states, the same of long requests that share prefixes, arrive while others
                run and are cut (``spec_plugin.engine.selftest.states``);
``finite``      no log-prob is NaN or infinite, in either arm;
``samples``     at the run's own sampling options, equal distributions by exact tests (``spec_plugin.engine.selftest.stats``): of
                token counts between the arms, and of the speculating arm against its stated log-probs;
``logprobs``    the stated log-probs agree with a teacher-forced recomputation: by the engine itself, as plain requests of one
                token that end in the prefix (its ``prompt_logprobs`` are no evidence, vLLM issue 53488); one token, or one
                in 32, that differs too much, where all else agrees, counts if others are found that do;
``switching``   counts once more, of requests under which k is switched and the draft is paused and goes on
                (``spec_plugin.engine.selftest.switching``);
``break-even``  not a test: what a verification step costs against a plain step, for the controller (law 7).

Chance of rejecting a correct engine: ``alpha``, shared by the two tests under ``samples`` and that under ``switching``. The
other checks have tolerances for rounding, not error levels; with noise of 0.02 to 0.2 nats on every logit, rounded to bfloat16
and not, ``greedy`` failed none of 160,000 simulated engines. Tolerance in nats: max(1e-3, 32 * eps of the dtype). Logits of
language models are about 16 to 32, where neighbouring numbers are 16 to 32 eps / 2 apart: the tolerance is two such steps, 0.25
for bfloat16, 0.031 for float16; float32 gets a floor of 1e-3 for sums in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import torch

from spec_plugin.engine.protocol import Engine
from spec_plugin.engine.schedule.channel import pause_idle_draft, schedule_state, set_schedule, take_steps
from spec_plugin.engine.selftest.plan import SelfTestPlan
from spec_plugin.engine.selftest.probe import Probe, calibrate
from spec_plugin.engine.selftest.stages import Arms, greedy_stage, logprobs_stage, samples_stage, states_stage
from spec_plugin.engine.selftest.states import keeps_states
from spec_plugin.engine.selftest.switching import switching_stage
from spec_plugin.events import Check, SelfTestReport, StepTiming

MOST_AT_ONCE = 256  # requests: the sampler's memory, with the log-probs of all of them, is nobody's budget
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


async def run_self_test(engine: Engine, plan: SelfTestPlan) -> SelfTestReport:
    """Test a running engine; never raises for what the engine does, every trouble is a failed check.

    Args:
        engine: built with ``scheduler_cls=SCHEDULER`` and a dynamic schedule; idle.
        plan: what is asked of it, and how long that may take.
    """
    return await _SelfTest(engine, plan).run()


class _SelfTest:
    """The stages in order, under one deadline; what they have found so far."""

    def __init__(self, engine: Engine, plan: SelfTestPlan) -> None:
        self.engine, self.plan = engine, plan
        self.begun = time.perf_counter()
        sampling = plan.sampling
        if not sampling.get("temperature", 1.0):  # a greedy run: its distribution is what `greedy` tests
            sampling = {**sampling, "temperature": 1.0}
        self.probe = Probe(engine, sampling, min(plan.max_num_seqs, MOST_AT_ONCE), plan.adapter)
        self.table: list[int] | None = None  # the engine's own, put back in the end
        self.checks: list[Check] = []
        self.steps: tuple[StepTiming, ...] = ()

    async def run(self) -> SelfTestReport:
        """All checks in order; the schedule and the prefix cache are left as if nothing had happened."""
        probe, plan, arms = self.probe, self.plan, Arms()
        rounding = tolerance(self.engine.vllm_config.model_config.dtype)
        if await self._in_time("engine", self._prepare()):
            await self._stage("greedy", greedy_stage(probe, plan, rounding))
            if keeps_states(self.engine.vllm_config):
                await self._stage("states", states_stage(probe, plan, rounding))
            await self._stage("samples", samples_stage(probe, plan, arms, self.begun))
            await self._stage("logprobs", logprobs_stage(probe, plan, arms, self.begun, rounding))
            if self.table is not None:
                entries = len(self.table)
                await self._stage("switching", switching_stage(probe, plan, entries, self.begun))
                await self._calibrate(entries)
        self.checks += await restore(self.engine, self.table)
        return SelfTestReport(tuple(self.checks), time.perf_counter() - self.begun, self.steps)

    async def _prepare(self) -> None:
        self.table = (await schedule_state(self.engine))["table"]
        if self.table is not None:
            await set_schedule(self.engine, [self.plan.k] * len(self.table))

    async def _stage(self, name: str, stage: AsyncIterator[Check]) -> None:
        async def collect() -> None:
            async for check in stage:
                self.checks.append(check)

        await self._in_time(name, collect())

    async def _in_time(self, name: str, work: Awaitable[None]) -> bool:
        """Did it end well within the hard limit; if not, a failed check of this name says why."""
        limit = self.plan.hard_limit
        left = self.begun + limit - time.perf_counter()
        try:
            await asyncio.wait_for(work, max(0.01, left))
        except (asyncio.TimeoutError, TimeoutError):
            reason, late = f"not finished within the time limit of {limit:g} s", True
        except Exception as error:  # whatever it is, the engine is not proven
            reason, late = f"{type(error).__name__}: {error}", False
        else:
            return True
        self.checks.append(Check(name, False, reason, out_of_time=late))
        return False

    async def _calibrate(self, entries: int) -> None:
        seconds, now = self.plan.seconds, time.perf_counter()
        deadline = max(self.begun + 0.9 * seconds, now + CALIBRATED_FOR * seconds)
        work = calibrate(self.probe, self.plan.prompts, self.plan.timed, entries, deadline)
        try:
            await take_steps(self.engine)  # those of the checks: another k for each half of a batch
            most = min(self.begun + self.plan.hard_limit, deadline + seconds) - now
            await asyncio.wait_for(work, max(0.01, most))
        except (asyncio.TimeoutError, TimeoutError):
            pass  # what was measured until here is kept
        except Exception as error:
            self.checks.append(Check("break-even", False, f"{type(error).__name__}: {error}"))
            return
        finally:
            with contextlib.suppress(Exception):  # an engine that is gone: its checks say so
                self.steps = tuple(t for t in await take_steps(self.engine) if t.alike)
        measured = SelfTestReport((), 0.0, self.steps).break_even
        found = ", ".join(f"{b}: {v:.2f}" for b, v in measured.items()) or "nothing measured in time"
        self.checks.append(Check("break-even", True, f"batch size: acceptance length: {found}"))


async def restore(engine: Engine, table: list[int] | None) -> tuple[Check, ...]:
    """Give the engine back with its own table and a draft that is not paused; a failed check if that fails.

    Args:
        engine: whose test is over, or was cut short.
        table: the engine's own; None if it has none, or it is not known.
    """

    async def put_back() -> None:
        if table is not None:
            await pause_idle_draft(engine, False)  # as it was
            await set_schedule(engine, table)
        await engine.reset_prefix_cache()

    try:
        await asyncio.wait_for(put_back(), 10.0)
    except Exception as error:
        return (Check("restore", False, f"{type(error).__name__}: {error}"),)
    return ()
