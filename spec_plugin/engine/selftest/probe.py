"""Requests to a running engine, each plain or speculating, and what the engine says of their tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from spec_plugin.engine.protocol import Engine
from spec_plugin.engine.selftest.self_test_plan import Sampled
from spec_plugin.engine.selftest.verdicts import tolerance
from spec_plugin.engine.vllm.requests import of_length
from spec_plugin.engine.vllm.schedule.plain import PLAIN

T = TypeVar("T")

TOP = 20  # most likely tokens whose log-probs are asked for; ``EngineFront.engine_arguments`` lets an engine state so many


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
    """Sends requests to one engine, no more at a time than it takes."""

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], max_num_seqs: int, adapter: Any = None) -> None:
        """Keep what every request needs.

        Args:
            engine: running.
            sampling: the run's own ``temperature``, ``top_p``, ``top_k``, …; a seed is left out, samples must be independent,
                and so are stop tokens, requests must be of equal length.
            max_num_seqs: most requests in flight.
            adapter: vLLM's LoRARequest that the run's own requests come with, if they do.
        """
        self.engine, self.adapter = engine, adapter
        self.sampling = {k: v for k, v in sampling.items() if k not in ("seed", "stop_token_ids")}
        self.begun = time.perf_counter()
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._name = f"spec-self-test-{time.monotonic_ns()}"
        self._ids = itertools.count()

    @property
    def tolerance(self) -> float:
        """Of this engine's dtype, see ``verdicts.tolerance``."""
        return tolerance(self.engine.vllm_config.model_config.dtype)

    @property
    def full_graphs(self) -> bool:
        """Has the engine CUDA graphs of whole steps, for batches whose requests all read the same number of tokens."""
        return bool(self.engine.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())

    def params(self, tokens: int, plain: bool, as_it_grows: bool = False, **options: Any) -> Any:
        """vLLM's ``SamplingParams`` of a request of exactly ``tokens`` tokens, see ``requests.of_length``."""
        extra = {"extra_args": dict(PLAIN)} if plain else {}
        return of_length(tokens, as_it_grows, {**self.sampling, **options, **extra})

    async def sample(
        self,
        index: int,
        prompt: Sequence[int],
        params: Any,
        reaches: tuple[int, asyncio.Event] | None = None,
    ) -> Sampled:
        """Run one request of prompt ``index`` (token ids) to its end, waiting for a free slot first.

        ``reaches``: (n, event) sets the event when n tokens are sampled, if the request is answered as it grows.
        """
        ids, name = {"prompt_token_ids": list(prompt)}, f"{self._name}-{next(self._ids)}"
        async with self._slots:
            async for output in self.engine.generate(ids, params, request_id=name, lora_request=self.adapter):
                last = output.outputs[0]
                if reaches is not None and len(last.token_ids) >= reaches[0]:
                    reaches[1].set()
        return _read(index, last, params.logprobs or 0)

    async def both_arms(
        self, prompts: Sequence[tuple[int, Sequence[int]]], tokens: int, **options: Any
    ) -> tuple[list[Sampled], list[Sampled]]:
        """The same (index, prompt) pairs in both arms of the same batches: (speculating, plain), with their top log-probs."""
        arms = [self.params(tokens, plain, logprobs=TOP, **options) for plain in (False, True)]
        found = await gather_or_cancel([self.sample(i, prompt, params) for i, prompt in prompts for params in arms])
        return found[0::2], found[1::2]


def _read(index: int, output: Any, n: int) -> Sampled:
    length = len(output.token_ids)
    logprobs, top = np.full(length, np.nan), np.full((length, n), -np.inf)
    top_ids = np.full((length, n), -1, dtype=np.int64)
    for t, (token, entry) in enumerate(zip(output.token_ids, output.logprobs or (), strict=bool(output.logprobs))):
        logprobs[t] = entry[token].logprob
        # n + 1 entries: the n most likely and the sampled one, which was not among them. Order by id within a tie, so
        # that nothing here depends on which token was sampled.
        best = [(-v.logprob, i) for i, v in entry.items() if len(entry) <= n or i != token]
        for place, (minus, i) in enumerate(sorted(best)):
            top[t, place], top_ids[t, place] = -minus, i
    return Sampled(index, tuple(output.token_ids), logprobs, top, top_ids)
