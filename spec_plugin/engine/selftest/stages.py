"""The stages of the self-test, which ask a running engine; ``test`` says what they prove.

Each yields its checks as they are known: one that is cut short, or fails, has yielded those before that, and leaves in ``Arms``
what it has sampled. The probe is of an engine whose schedule drafts at every batch size; ``tolerance`` is in nats, what rounding
explains; ``begun`` is ``time.perf_counter()`` when the test began.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spec_plugin.engine.schedule.counters import read_spec_counters
from spec_plugin.engine.selftest.plan import SelfTestPlan
from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel
from spec_plugin.engine.selftest.states import states_checks
from spec_plugin.engine.selftest.verdicts import (
    LEAST_SAMPLES,
    Sampled,
    counts_check,
    evidence_check,
    few_alone,
    finite_check,
    greedy_check,
    greedy_limit,
    greedy_noise,
    logprob_check,
    not_stated,
    path_check,
    spread,
)
from spec_plugin.events import Check

GREEDY_TOKENS = 24
SAMPLE_PROMPTS = 4  # few prompts, so that many samples share a context
MOST_SAMPLES = 256  # per prompt and arm
MOST_CHEAP_SAMPLES, CHEAP_S = 1024, 7.5  # and so many, as far as they take no more seconds than that
SCORED = 128  # (sequence, position) pairs scored per arm, if there is time
LEAST_SCORED = 32  # in any case
AGAIN = 3  # so many times as many pairs lie ready for a second look,
AGAIN_S = 5.0  # of which those are scored that take no longer, and as many as at first in any case
SAMPLES_UNTIL = 0.55  # share of the time after which no round of samples is begun; the rest is for the last checks
SCORED_UNTIL = 0.75  # and after which no more pairs are scored
Pair = tuple[tuple[Sampled, int], tuple[Sampled, int]]  # (sequence, position), speculating and plain


@dataclass
class Arms:
    """What was sampled at the run's own options, side by side, with drafts and without."""

    spec: list[Sampled] = field(default_factory=list)
    plain: list[Sampled] = field(default_factory=list)


async def greedy_stage(probe: Probe, plan: SelfTestPlan, tolerance: float) -> AsyncIterator[Check]:
    """Greedy tokens; where they differ, how far plain requests differ among themselves, and then once more."""
    chosen = list(enumerate(plan.prompts))
    options = {"temperature": 0.0, "logprobs": probe.top}
    spec, plain = await _side_by_side(probe, chosen, GREEDY_TOKENS, **options)
    check = greedy_check(spec, plain, tolerance)
    if not check.passed:  # how far do plain requests differ among themselves, in batches of other shapes
        params = probe.params(GREEDY_TOKENS, True, **options)
        alone = [await _in_groups([probe.sample(i, p, params) for i, p in chosen], size) for size in (len(chosen), 2)]
        noise = [d for a, b in itertools.combinations([plain, *alone], 2) for d in greedy_noise(a, b)]
        limit = greedy_limit(noise, tolerance)
        check = greedy_check(spec, plain, limit)
        if not check.passed:  # once more, in other places of the batch
            spec, plain = await _side_by_side(probe, chosen[::-1], GREEDY_TOKENS, **options)
            again = greedy_check(spec, plain, limit)
            check = again if again.passed else check
    yield check


async def states_stage(probe: Probe, plan: SelfTestPlan, tolerance: float) -> AsyncIterator[Check]:
    """See ``states``."""
    for check in await states_checks(probe, probe.engine, plan.prompts, tolerance):
        yield check
    await probe.engine.reset_prefix_cache()


async def samples_stage(probe: Probe, plan: SelfTestPlan, arms: Arms, begun: float) -> AsyncIterator[Check]:
    """Samples of both arms, as many as there is time for, into ``arms``."""
    chosen = list(enumerate(plan.prompts[:SAMPLE_PROMPTS]))
    tokens = 2 * (plan.k + 1) + 1  # two whole verification rounds after the first token
    repeat = max(1, probe.max_num_seqs // (2 * len(chosen)))
    before = read_spec_counters()
    for _ in range(2):  # cold, then timed; not used, so that the number of samples is fixed before they are seen
        begin = time.perf_counter()
        await _side_by_side(probe, chosen * repeat, tokens, logprobs=probe.top)
    now, until = time.perf_counter(), begun + SAMPLES_UNTIL * plan.seconds
    least = math.ceil(LEAST_SAMPLES / (repeat * len(chosen)))
    rounds = max(least, min(math.ceil(MOST_SAMPLES / repeat), int(0.8 * (until - now) / (now - begin))))
    cheap = int(min(CHEAP_S, 0.8 * (until - now)) / (now - begin))
    rounds = max(rounds, min(math.ceil(MOST_CHEAP_SAMPLES / repeat), cheap))
    for i in range(rounds):
        if i >= least and time.perf_counter() > until:
            break
        spec, plain = await _side_by_side(probe, chosen * repeat, tokens, logprobs=probe.top)
        arms.spec += spec
        arms.plain += plain
    yield finite_check(arms.spec, arms.plain)
    yield counts_check(arms.spec, arms.plain, plan.level)
    if states_what_it_samples(probe.sampling, probe.logprobs_mode, probe.top):
        yield evidence_check(arms.spec, arms.plain, plan.vocab_size, plan.level)
    else:
        yield not_stated(probe.logprobs_mode, probe.sampling)
    yield path_check(before, read_spec_counters())


def states_what_it_samples(sampling: Mapping[str, Any], logprobs_mode: str, top: int) -> bool:
    """Are the stated log-probs those of the distribution that is sampled: processed ones, or nothing to process."""
    raw = (
        sampling.get("temperature", 1.0) == 1.0
        and sampling.get("top_p", 1.0) == 1.0
        and sampling.get("top_k", 0) in (0, -1)
    )
    only = set(sampling) <= {"temperature", "top_p", "top_k"}
    return top > 0 and (logprobs_mode == "processed_logprobs" or (logprobs_mode == "raw_logprobs" and raw and only))


async def logprobs_stage(
    probe: Probe, plan: SelfTestPlan, arms: Arms, begun: float, tolerance: float
) -> AsyncIterator[Check]:
    """Log-probs of what was sampled, recomputed, as many as there is time for; no check where nothing was sampled."""
    if not arms.spec:
        return
    await probe.engine.reset_prefix_cache()  # the recomputation must not read what speculation wrote
    pairs = list(zip(*(spread(arm, (1 + AGAIN) * SCORED) for arm in (arms.spec, arms.plain)), strict=False))
    random.Random(0).shuffle(pairs)  # so that the first ones are spread too
    first = await _rescored(probe, plan, pairs[:SCORED], tolerance, begun + SCORED_UNTIL * plan.seconds)
    check = logprob_check("logprobs", *first, tolerance)
    if few_alone(*first, tolerance):  # rounding that turns a choice of experts does that once in a while
        until = time.perf_counter() + AGAIN_S
        again = await _rescored(probe, plan, pairs[SCORED:], tolerance, until, least=len(first[0]))
        other = logprob_check("logprobs", *again, tolerance)
        check = replace(other, detail=f"{other.detail}, looked at after {check.detail}")
    yield check


async def _rescored(
    probe: Probe, plan: SelfTestPlan, pairs: Sequence[Pair], tolerance: float, until: float, least: int = LEAST_SCORED
) -> tuple[list[float], list[float]]:
    """See ``_rescore``, of both arms: so many pairs in any case, and more until then."""
    found: list[float | None] = []
    size = max(1, probe.max_num_seqs // 2)
    for i in range(0, len(pairs), size):
        if i >= least and time.perf_counter() > until:
            break
        some = [(s, t) for both in pairs[i : i + size] for s, t in both]
        found += await gather_or_cancel([_rescore(probe, plan, s, t, tolerance) for s, t in some])
    spec, plain = ([d for d in arm if d is not None] for arm in (found[0::2], found[1::2]))
    return spec, plain


async def _side_by_side(
    probe: Probe, prompts: Sequence[tuple[int, Sequence[int]]], tokens: int, **options: Any
) -> tuple[list[Sampled], ...]:
    """The same prompts in both arms of the same batches: (speculating, plain)."""
    params = {plain: probe.params(tokens, plain, **options) for plain in (False, True)}
    work = [probe.sample(i, p, params[plain]) for i, p in prompts for plain in (False, True)]
    results = await gather_or_cancel(work)
    return results[0::2], results[1::2]


async def _in_groups(work: Sequence[Coroutine[Any, Any, Sampled]], size: int) -> list[Sampled]:
    """So many at a time."""
    return [s for i in range(0, len(work), size) for s in await gather_or_cancel(work[i : i + size])]


async def _rescore(probe: Probe, plan: SelfTestPlan, sampled: Sampled, t: int, tolerance: float) -> float | None:
    """|stated - recomputed| for token t; a token that is not among the most likely is at most as likely as the last."""
    prompt = [*plan.prompts[sampled.prompt], *sampled.tokens[:t]]
    least = max(0, probe.sampling.get("min_tokens", 0) - t)  # t of them are part of the prompt now
    params = probe.params(1, plain=True, logprobs=probe.top, min_tokens=least)
    again = await probe.sample(0, prompt, params)
    stated, found = sampled.logprobs[t], np.flatnonzero(again.top_ids[0] == sampled.tokens[t])
    if found.size:
        return abs(float(stated - again.top[0, found[0]]))
    if again.tokens[0] == sampled.tokens[t]:
        return abs(float(stated - again.logprobs[0]))
    excess = float(stated - again.top[0, -1]) if probe.top else 0.0
    return excess if excess > 4 * tolerance or math.isnan(excess) else None
