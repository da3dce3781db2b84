"""Small experiments on a running engine: batches of requests under a deadline, and what one decoding step costs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from spec_plugin.engine.counters import read_spec_counters
from spec_plugin.engine.scheduler import PLAIN, pause_idle_draft, set_schedule
from spec_plugin.engine.verdicts import Sampled

T = TypeVar("T")

STEPS = 24  # decoding steps of one measurement
PAIRS = 5  # measurements of each kind


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; when one fails, or we are cancelled, cancel the rest and wait until they have aborted their requests."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Probe:
    """Sends requests to one engine, each plain or speculating, and counts what speculation did."""

    def __init__(self, engine: AsyncLLM, sampling: Mapping[str, Any], max_num_seqs: int) -> None:
        """Keep what every request needs.

        Args:
            engine: the running engine; speculation's counters need ``disable_log_stats=False``.
            sampling: the run's own ``temperature``, ``top_p``, ``top_k``, …; never a seed, samples must be independent.
            max_num_seqs: most requests in flight.
        """
        self.engine, self.max_num_seqs = engine, max_num_seqs
        self.sampling = {k: v for k, v in sampling.items() if k != "seed"}
        model = engine.vllm_config.model_config
        self.logprobs_mode: str = model.logprobs_mode
        self.top = 20 if model.max_logprobs < 0 else min(20, model.max_logprobs)
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._name = f"spec-self-test-{time.monotonic_ns()}"
        self._ids = itertools.count()

    def params(self, tokens: int, plain: bool, **options: Any) -> SamplingParams:
        """Sampling parameters of a request of exactly ``tokens`` tokens."""
        extra = {"extra_args": dict(PLAIN)} if plain else {}
        merged = {"output_kind": RequestOutputKind.FINAL_ONLY, **self.sampling, **options, **extra}
        return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **merged)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        """vLLM's own stream of outputs for one request."""
        request_id = f"{self._name}-{next(self._ids)}"
        return self.engine.generate({"prompt_token_ids": list(prompt)}, params, request_id=request_id)

    async def sample(self, index: int, prompt: Sequence[int], params: SamplingParams) -> Sampled:
        """Run one request to its end, waiting for a free slot first."""
        async with self._slots:
            async for output in self.stream(prompt, params):
                last = output.outputs[0]
        return _read(index, last, params.logprobs or 0)


def _read(index: int, output: Any, n: int) -> Sampled:
    length = len(output.token_ids)
    logprobs, top = np.empty(length), np.full((length, n), -np.inf)
    top_ids, rank = np.full((length, n), -1, dtype=np.int64), np.full(length, -1, dtype=np.int64)
    for t, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        logprobs[t] = entry[token].logprob
        # n + 1 entries: the n most likely and the sampled one, which was not among them. Order by id within a tie, so
        # that nothing here depends on which token was sampled.
        best = [(-v.logprob, i) for i, v in entry.items() if len(entry) <= n or i != token]
        for r, (minus, i) in enumerate(sorted(best)):
            top[t, r], top_ids[t, r] = -minus, i
            if i == token:
                rank[t] = r
    return Sampled(index, tuple(output.token_ids), logprobs, top, top_ids, rank)


class _StepClock:
    """Times decoding from the moment all requests of a batch are in it until they have made enough steps."""

    def __init__(self, batch: int, k: int, steps: int) -> None:
        self.tokens, self.outputs, self.k, self.steps = [0] * batch, 0, k, steps
        self.begin: tuple[float, float] | None = None
        self.end: tuple[float, float] | None = None

    def tick(self, i: int, tokens: int, finished: bool) -> bool:
        """Request i got tokens; True when the measurement is over."""
        self.tokens[i] += tokens
        self.outputs += (
            self.begin is not None
        )  # about one a step; the exact number is read at both ends only: it is slow
        if self.begin is None:
            self.begin = self._now() if min(self.tokens) > 0 else None
        elif self.end is None and (finished or self.outputs >= self.steps * len(self.tokens)):
            self.end = self._now()
        return finished or self.end is not None

    def seconds_per_step(self) -> float | None:
        """The result; None when no step was counted."""
        if self.begin is None or self.end is None or self.end[1] <= self.begin[1]:
            return None
        return (self.end[0] - self.begin[0]) / (self.end[1] - self.begin[1])

    def _now(self) -> tuple[float, float]:
        now = time.perf_counter()
        steps = read_spec_counters()["drafts"] if self.k else sum(self.tokens)
        return now, steps / len(self.tokens)


async def measure_step(probe: Probe, prompts: Sequence[Sequence[int]], batch: int, k: int, steps: int) -> float | None:
    """Seconds of one decoding step with ``batch`` requests running, or None when the engine keeps no counters.

    The clock runs while all requests decode: from the last one's first token until they have made ``steps`` steps each on
    average, or one is finished. A plain request makes one step a token; the engine counts those of a speculating one.
    """
    clock = _StepClock(batch, k, steps)
    params = probe.params(2 + (steps + 1) * (k + 1), plain=False, output_kind=RequestOutputKind.DELTA)

    async def run(i: int) -> None:
        async with contextlib.aclosing(probe.stream(prompts[i % len(prompts)], params)) as stream:
            async for output in stream:
                if clock.tick(i, len(output.outputs[0].token_ids), output.finished):
                    return

    await gather_or_cancel([run(i) for i in range(batch)])
    return clock.seconds_per_step()


async def measure_break_even(
    probe: Probe, prompts: Sequence[Sequence[int]], k: int, entries: int, deadline: float, found: dict[int, float]
) -> None:
    """Fill ``found[batch size]`` = cost of a verification step / cost of a plain step, smallest batch first.

    That ratio is the acceptance length at which k drafted tokens give as many tokens per second as none. A plain and a
    speculating measurement follow each other; the median of the ratios of five such pairs counts, after one to warm up.
    Between them k=1 is run, whose steps the cost model gets to see in the engine's step log.
    "Plain" is k=0 in this engine with the draft paused, as it is when no batch size speculates.

    Args:
        probe: the engine.
        prompts: short prompts.
        k: tokens drafted per step.
        entries: length of the engine's schedule, max_num_seqs + 1.
        deadline: ``time.perf_counter()`` after which no further batch size is begun.
        found: the result, filled as it comes in.
    """
    largest, cost = probe.max_num_seqs, 0.0
    for batch in sorted({b for b in (1, 8, 32) if b <= largest} | {min(largest, 128)}):
        begin = time.perf_counter()
        if begin + 2 * cost > deadline:
            return
        ratios = []
        for repeat in range(PAIRS + 1):
            pair = []
            for width in dict.fromkeys((0, 1, k)):  # 1: for the cost model, which reads the engine's step log
                table = [width] * entries
                await set_schedule(probe.engine, table)
                await pause_idle_draft(probe.engine, table)
                pair.append(await measure_step(probe, prompts, batch, width, STEPS if repeat else 4))
            plain, speculating = pair[0], pair[-1]
            if plain is None or speculating is None:
                return
            if repeat:
                ratios.append(speculating / plain)
        found[batch] = statistics.median(ratios)
        cost = time.perf_counter() - begin
