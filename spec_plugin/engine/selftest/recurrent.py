"""Are a target's recurrent states right while requests share prefixes, come and go in the middle of drafted stretches.

A state (of a gated delta net, of Mamba) that was taken up at the wrong token, or read from a cache that rejected tokens were
written over, changes every token behind it, so requests are long and compared token by token with plain ones on a fresh cache:

1. plain requests: the reference; and plain requests whose prompts have half of its answers, which a prefill's kernels read in
   place of those that decode: what rounding explains;
2. speculating requests of the same prompts arrive one by one while others run; every second one is cut in its middle;
3. the prompts with the first half of their answers go on, speculating: where prefixes are cached, they hit what 2 has left. Of
   each prompt the cached block ends at another token, before, in and behind what was drafted.

Three checks: tokens as in ``greedy``, log-probs as in ``logprobs``, with the same limits, and the mean of the latter. They have
tolerances for rounding, no level. What they were measured to see, and what not: docs/guards.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import numpy as np

from spec_plugin.api.events import Check
from spec_plugin.engine.selftest import verdicts
from spec_plugin.engine.selftest.probe import TOP, Probe, gather_or_cancel
from spec_plugin.engine.selftest.self_test_plan import Sampled, SelfTestPlan

TOKENS = 48  # of an answer; its first half is drafted in 2, the second in 3
HALF = TOKENS // 2
MOST_DRIFT = 4.0  # times the mean that rounding explains
LEAST_DRIFT = 1 / 16  # of the tolerance, below which no drift is looked at
PAUSE_S = 0.02  # between two arrivals, at least: where a step takes longer, one step


async def states_stage(probe: Probe, plan: SelfTestPlan) -> AsyncIterator[Check]:
    """The three checks of the module, once all has been sampled; the prefix cache is empty afterwards."""
    engine, within = probe.engine, probe.tolerance
    asked = _prompts(engine.vllm_config, plan.prompts)
    whole, plain, spec, cut = (
        probe.params(tokens, is_plain, temperature=0.0, logprobs=TOP)
        for tokens, is_plain in ((TOKENS, True), (HALF, True), (HALF, False), (TOKENS, False))
    )
    begun = time.perf_counter()
    reference = await gather_or_cancel([probe.sample(i, p, whole) for i, p in enumerate(asked)])
    pause = max(PAUSE_S, (time.perf_counter() - begun) / TOKENS)
    await engine.reset_prefix_cache()
    go_on = [[*p, *r.tokens[:HALF]] for p, r in zip(asked, reference, strict=True)]
    again = await gather_or_cancel([probe.sample(i, p, plain) for i, p in enumerate(go_on)])
    await engine.reset_prefix_cache()
    work: list[Coroutine[Any, Any, Sampled | None]] = []
    for i, p in enumerate(asked):
        work.append(_late(probe, i * pause, i, p, spec))
        if i % 2:
            work.append(_cut(probe, (2 + i) * pause, i, p, cut))
    found = [s for s in await gather_or_cancel(work) if s is not None]
    found += await gather_or_cancel([_late(probe, i * pause, i, p, spec) for i, p in enumerate(go_on)])
    await engine.reset_prefix_cache()

    ends = [r.part(HALF, TOKENS) for r in reference]
    expected = [*(r.part(0, HALF) for r in reference), *ends]
    noise, differences = _differences(again, ends), _differences(found, expected)
    limit = verdicts.greedy_limit(verdicts.greedy_noise(ends, again), within)
    yield verdicts.greedy_check(found, expected, limit, "states: tokens")
    yield verdicts.logprob_check("states: log-probs", differences, noise, within)
    yield _drift(differences, noise, within)


def _prompts(vllm_config: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The prompts, each made longer by another number of tokens, so that a cached block ends at another token of each answer.

    Where prefixes are cached, and the context has room for it, all begin with so much that the first block ends within them.
    """
    cache, begin = vllm_config.cache_config, list[int]()
    block = cache.mamba_block_size or cache.block_size or 0
    if cache.enable_prefix_caching and block + 2 * TOKENS <= vllm_config.model_config.max_model_len:
        words = [token for prompt in prompts for token in prompt]
        begin = (words * (block // len(words) + 1))[: max(0, block - max(map(len, prompts)) - HALF)]
    return [[*begin, *(list(p) * 2)[: len(p) + i * HALF // len(prompts)]] for i, p in enumerate(prompts)]


def _drift(spec: Sequence[float], plain: Sequence[float], tolerance: float) -> Check:
    """A mean that is far from what rounding explains, where no single token is: states that are slightly wrong."""
    found, base = (float(np.mean(arm)) if arm else math.nan for arm in (spec, plain))
    limit = max(tolerance * LEAST_DRIFT, MOST_DRIFT * base)
    detail = f"mean {found:.2g} nats (limit {limit:.2g}), of what rounding explains {base:.2g}"
    return Check("states: drift", found <= limit, detail, out_of_time=not (spec and plain))  # a NaN compares false


async def _late(probe: Probe, seconds: float, *request: Any) -> Sampled:
    await asyncio.sleep(seconds)
    return await probe.sample(*request)


async def _cut(probe: Probe, seconds: float, *request: Any) -> None:
    """Lets go of a request after a few tokens: the engine aborts it in the middle of a drafted stretch."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(probe.sample(*request), seconds)


def _differences(found: Sequence[Sampled], expected: Sequence[Sampled]) -> list[float]:
    """|log-prob - the reference's| in nats of each token, as long as a request goes with its reference."""
    pairs = ((a, b, verdicts.agreed(a, b)) for a, b in zip(found, expected, strict=True))
    return [abs(float(d)) for a, b, n in pairs for d in a.logprobs[:n] - b.logprobs[:n]]
