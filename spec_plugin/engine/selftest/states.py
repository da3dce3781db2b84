"""Are a target's recurrent states right while requests share prefixes, come and go in the middle of drafted stretches.

Only for engines that keep states (a gated delta net, Mamba), on the run's own scheduler settings. A state that was taken up at
the wrong token, or read from a cache that rejected tokens were written over, changes every token behind it, so requests are
long and compared token by token with plain ones on a fresh cache:

1. plain requests: the reference; and plain requests whose prompts have half of its answers, which a prefill's kernels read in
   place of those that decode: what rounding explains;
2. speculating requests of the same prompts arrive one by one while others run; every second one is cut in its middle;
3. the prompts with the first half of their answers go on, speculating: where prefixes are cached, they hit what 2 has left. Of
   each prompt the cached block ends at another token, before, in and behind what was drafted.

Three checks: tokens as in ``greedy``, log-probs as in ``logprobs``, with the same limits, and the mean of the latter. They have
tolerances for rounding, no level: a correct engine fails where its plain arms agree, and the drafted one differs from them by
``greedy_limit``, ten times the tolerance, or four times what rounding explains in the mean.

Measured on a tiny Qwen3-Next in bfloat16 on a CPU (``tests/engine/hybrid.py``; its draft makes 3.6 of 4 tokens a step, and a
wrong state costs 0.3 nats): of 12 tests of a correct engine none failed, the mean was at most 0.63 of its limit. Of
engines that took up the state of another accepted token, one less, one more, always the first, or of another request, in all
steps, all of 16 failed. In one step of ten, 13 of 16 did (one more: one of four). A request that begins in the state which
another one has left is not seen (0 of 8): that fades within the prompt, and it happens to plain requests, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel
from spec_plugin.engine.selftest.verdicts import Sampled, greedy_check, greedy_limit, greedy_noise, logprob_check
from spec_plugin.events import Check

TOKENS = 48  # of an answer; its first half is drafted in 2, the second in 3
MOST_DRIFT = 4.0  # times the mean that rounding explains
LEAST_DRIFT = 1 / 16  # of the tolerance, below which no drift is looked at
PAUSE_S = 0.02  # between two arrivals, at least: where a step takes longer, one step


def keeps_states(vllm_config: Any) -> bool:
    """Does a running engine hold states beside its cache of keys and values."""
    return bool(vllm_config.model_config.is_hybrid)


def shared_prefix(vllm_config: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all requests begin with: where prefixes are cached, so long that the first block ends within their answers.

    Empty where the model's context has no room for it.
    """
    cache = vllm_config.cache_config
    block = cache.mamba_block_size or cache.block_size or 0
    words = [token for prompt in prompts for token in prompt]
    if not cache.enable_prefix_caching or block + 2 * TOKENS > vllm_config.model_config.max_model_len:
        return []
    longest = max(map(len, prompts))
    return (words * (block // len(words) + 1))[: max(0, block - longest - TOKENS // 2)]


async def states_checks(
    probe: Probe, engine: Any, prompts: Sequence[Sequence[int]], tolerance: float
) -> tuple[Check, ...]:
    """See the module.

    Args:
        probe: of the engine.
        engine: with a schedule that drafts at every batch size.
        prompts: token ids; a few.
        tolerance: in nats, what rounding explains.
    """
    begin = shared_prefix(engine.vllm_config, prompts)
    # the end of a block lies at another token of each answer
    asked = [[*begin, *(list(p) * 2)[: len(p) + i * TOKENS // (2 * len(prompts))]] for i, p in enumerate(prompts)]
    half = TOKENS // 2
    options: dict[str, Any] = {"temperature": 0.0, "logprobs": probe.top}
    plain, spec = probe.params(TOKENS, True, **options), probe.params(half, False, **options)
    begun = time.perf_counter()
    reference = await gather_or_cancel([probe.sample(i, p, plain) for i, p in enumerate(asked)])
    pause = max(PAUSE_S, (time.perf_counter() - begun) / TOKENS)
    await engine.reset_prefix_cache()
    go_on = [[*p, *r.tokens[:half]] for p, r in zip(asked, reference, strict=True)]
    ends = [_part(r, half, TOKENS) for r in reference]
    plain = probe.params(half, True, **options)
    again = await gather_or_cancel([probe.sample(i, p, plain) for i, p in enumerate(go_on)])
    await engine.reset_prefix_cache()
    arrived = [_late(probe, i, p, spec, i * pause) for i, p in enumerate(asked)]
    cut = [
        _cut(probe, i, p, probe.params(TOKENS, False, **options), (2 + i) * pause) for i, p in enumerate(asked) if i % 2
    ]
    first = (await gather_or_cancel([*arrived, *cut]))[: len(asked)]
    second = await gather_or_cancel([_late(probe, i, p, spec, i * pause) for i, p in enumerate(go_on)])
    found = [*(f for f in first if f is not None), *(s for s in second if s is not None)]
    expected = [*(_part(r, 0, half) for r in reference), *ends]
    limit = max(tolerance, greedy_limit(greedy_noise(ends, again), tolerance))
    tokens, noise = greedy_check(found, expected, limit), _differences(again, ends)
    differences = _differences(found, expected)
    stated = logprob_check("states: log-probs", differences, noise, tolerance)
    return Check("states: tokens", tokens.passed, tokens.detail), stated, _drift(differences, noise, tolerance)


def _drift(spec: Sequence[float], plain: Sequence[float], tolerance: float) -> Check:
    """A mean that is far from what rounding explains, where no single token is: states that are slightly wrong."""
    found, base = (float(np.mean(arm)) if arm else math.nan for arm in (spec, plain))
    limit = max(tolerance * LEAST_DRIFT, MOST_DRIFT * base)
    detail = f"mean {found:.2g} nats (limit {limit:.2g}), of what rounding explains {base:.2g}"
    return Check("states: drift", found <= limit, detail, out_of_time=not (spec and plain))  # a NaN compares false


async def _late(probe: Probe, index: int, prompt: Sequence[int], params: Any, seconds: float) -> Sampled | None:
    await asyncio.sleep(seconds)
    return await probe.sample(index, prompt, params)


async def _cut(probe: Probe, index: int, prompt: Sequence[int], params: Any, seconds: float) -> None:
    """Begins a request and lets go of it after a few tokens: the engine aborts it in the middle of a drafted stretch."""
    try:
        await asyncio.wait_for(probe.sample(index, prompt, params), seconds)
    except (asyncio.TimeoutError, TimeoutError):
        return


def _part(s: Sampled, begin: int, end: int) -> Sampled:
    return Sampled(
        s.prompt,
        s.tokens[begin:end],
        *(np.asarray(getattr(s, name))[begin:end] for name in ("logprobs", "top", "top_ids", "rank")),
    )


def _differences(found: Sequence[Sampled], expected: Sequence[Sampled]) -> list[float]:
    """|log-prob - the reference's| in nats of each token, as long as a request goes with its reference."""
    out: list[float] = []
    for a, b in zip(found, expected, strict=True):
        for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
            if x != y:
                break
            out.append(abs(float(a.logprobs[i] - b.logprobs[i])))
    return out
