"""Small experiments on a running engine: batches of requests under a deadline, and what one decoding step costs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from spec_plugin.engine.protocol import Engine
from spec_plugin.engine.schedule.channel import pause_idle_draft, put_in_force
from spec_plugin.engine.schedule.plain import PLAIN
from spec_plugin.engine.selftest.verdicts import Sampled
from spec_plugin.events import Schedule

T = TypeVar("T")

TOP = 20  # most likely tokens whose log-probs are asked for
TOKENS = 17  # that each request of a calibration makes
ROUNDS = 3  # of all kinds and batch sizes


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

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], max_num_seqs: int, adapter: Any = None) -> None:
        """Keep what every request needs.

        Args:
            engine: the running engine; speculation's counters need ``disable_log_stats=False``.
            sampling: the run's own ``temperature``, ``top_p``, ``top_k``, …; a seed is left out, samples must be independent,
                and so are stop tokens, requests must be of equal length.
            max_num_seqs: most requests in flight.
            adapter: vLLM's LoRARequest that the run's own requests come with, if they do.
        """
        self.engine, self.max_num_seqs, self.adapter = engine, max_num_seqs, adapter
        self.sampling = {k: v for k, v in sampling.items() if k not in ("seed", "stop_token_ids")}
        model = engine.vllm_config.model_config
        self.logprobs_mode: str = model.logprobs_mode
        self.top = TOP if model.max_logprobs < 0 else min(TOP, model.max_logprobs)
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
        prompt_ids = {"prompt_token_ids": list(prompt)}
        return self.engine.generate(prompt_ids, params, request_id=request_id, lora_request=self.adapter)

    async def sample(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        reaches: tuple[int, asyncio.Event] | None = None,
    ) -> Sampled:
        """Run one request to its end, waiting for a free slot first.

        Args:
            index: of the prompt.
            prompt: its token ids.
            params: the request's; to follow it, ``output_kind`` must be cumulative.
            reaches: set this event when it has sampled so many tokens.
        """
        async with self._slots:
            async for output in self.stream(prompt, params):
                last = output.outputs[0]
                if reaches is not None and len(last.token_ids) >= reaches[0]:
                    reaches[1].set()
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


async def calibrate(
    probe: Probe, prompts: Sequence[Sequence[int]], ks: Sequence[int], entries: int, deadline: float
) -> None:
    """Have the engine decode at several batch sizes with so many drafted tokens: its step log tells what that takes.

    The kinds take turns, and so do the batch sizes, so that a busy moment of the machine meets all of them. With 0 the draft
    is paused, as it is when no batch size speculates, and once more with 0 it reads the text, as in the plain steps of a pair.
    Smallest and fullest batch first: between them a model can guess, beyond them it cannot.

    Args:
        probe: the engine.
        prompts: short prompts.
        ks: tokens drafted per step, 0 among them.
        entries: length of the engine's schedule, max_num_seqs + 1.
        deadline: ``time.perf_counter()`` after which no batch begins that would, by the one before, not end in time.
    """
    params = probe.params(TOKENS, plain=False, output_kind=RequestOutputKind.FINAL_ONLY)
    full = min(probe.max_num_seqs, 128)
    took: dict[int, float] = {}  # seconds of all kinds once, by batch size
    latest = 0.0
    for _ in range(ROUNDS):
        for batch in dict.fromkeys((1, full, *(b for b in (8, 32) if b < full))):
            begin = time.perf_counter()
            if begin + took.get(batch, latest) > deadline:
                return
            for width, paused in [*((k, True) for k in ks), (0, False)]:
                await put_in_force(probe.engine, Schedule((width,) * entries))
                if not paused:
                    # nothing is drafted, and the draft reads the text: as in stretches that are timed plainly
                    await pause_idle_draft(probe.engine, False)
                await gather_or_cancel([_run(probe, prompts[i % len(prompts)], params) for i in range(batch)])
            took[batch] = latest = time.perf_counter() - begin


async def _run(probe: Probe, prompt: Sequence[int], params: SamplingParams) -> None:
    async for _ in probe.stream(prompt, params):
        pass
