"""The stages of the self-test that ask an engine while nothing changes; ``test`` says what they prove.

Each yields its checks as they are known: one that is cut short, or fails, has yielded those before that. The engine drafts
``plan.k`` tokens at every batch size.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Sequence

from spec_plugin.api.events import Check
from spec_plugin.engine.selftest import verdicts
from spec_plugin.engine.selftest.probe import TOP, Probe, gather_or_cancel
from spec_plugin.engine.selftest.self_test_plan import Sampled, SelfTestPlan
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters

GREEDY_TOKENS = 24
MOST_SAMPLES, MOST_CHEAP_SAMPLES = 256, 1024  # per prompt and arm; the latter as far as they take no longer than
CHEAP_S = 7.5  # seconds
SAMPLED_UNTIL = 0.55  # share of the time after which no round of samples is begun; the rest is for the other checks
SCORED = 200  # tokens in each arm whose log-probs are recomputed
#: of which so many may differ by more than rounding: a tiny mixture of experts in bfloat16 once showed 1.2 nats in some 10,000
#: tokens. At that rate 0.02 % of the correct engines fail; a fault of one token in 50 is seen in 91 % of the tests
STRAYS = 1


async def greedy_stage(probe: Probe, plan: SelfTestPlan) -> AsyncIterator[Check]:
    """Greedy tokens; where they differ, how far plain requests differ among themselves, and then once more."""
    chosen = list(enumerate(plan.prompts))
    spec, plain = await _greedy_arms(probe, chosen)
    check = verdicts.greedy_check(spec, plain, probe.tolerance)
    if not check.passed:
        params = probe.params(GREEDY_TOKENS, True, temperature=0.0, logprobs=TOP)
        arms = [plain[: len(chosen)]]
        for size in (len(chosen), 2):  # so many at a time: batches of other shapes
            groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
            found = [await gather_or_cancel([probe.sample(i, p, params) for i, p in group]) for group in groups]
            arms.append([*itertools.chain(*found)])
        noise = [d for a, b in itertools.combinations(arms, 2) for d in verdicts.greedy_noise(a, b)]
        limit = verdicts.greedy_limit(noise, probe.tolerance)
        check = verdicts.greedy_check(spec, plain, limit)
        if not check.passed:  # once more, in other places of the batch
            again = verdicts.greedy_check(*await _greedy_arms(probe, chosen[::-1]), limit)
            check = again if again.passed else check
    yield check


async def _greedy_arms(
    probe: Probe, prompts: Sequence[tuple[int, Sequence[int]]]
) -> tuple[list[Sampled], list[Sampled]]:
    """(speculating, plain), side by side; and where rollouts run in full CUDA graphs the former once more by themselves.

    Beside plain ones they verify without such a graph: then not all requests of a step read the same number of tokens.
    """
    spec, plain = await probe.both_arms(prompts, GREEDY_TOKENS, temperature=0.0)
    if not probe.full_graphs:
        return spec, plain
    params = probe.params(GREEDY_TOKENS, False, temperature=0.0, logprobs=TOP)
    alone = await gather_or_cancel([probe.sample(i, prompt, params) for i, prompt in prompts])
    return [*spec, *alone], [*plain, *plain]


async def samples_stage(probe: Probe, plan: SelfTestPlan) -> AsyncIterator[Check]:
    """Samples of both arms at the run's own options, as many as there is time for; then their log-probs, recomputed."""
    before = read_spec_counters()
    spec, plain = await _samples(probe, plan)
    yield verdicts.finite_check(spec, plain)
    yield verdicts.counts_check(spec, plain, plan.level)
    unproven = verdicts.not_stated(probe.engine.vllm_config.model_config.logprobs_mode, probe.sampling)
    yield unproven or verdicts.evidence_check(spec, plain, plan.vocab_size, plan.level)
    yield verdicts.path_check(before, read_spec_counters())
    await probe.engine.reset_prefix_cache()  # the recomputation must not read what speculation wrote
    of_spec, of_plain = [await _recomputed(probe, plan, arm) for arm in (spec, plain)]
    yield verdicts.logprob_check("logprobs", of_spec, of_plain, probe.tolerance, STRAYS)


async def _samples(probe: Probe, plan: SelfTestPlan) -> tuple[list[Sampled], list[Sampled]]:
    """Rounds of samples, (speculating, plain); how many is fixed before they are seen, unless the engine becomes slower."""
    batch, tokens = plan.half_batch, 2 * (plan.k + 1) + 1  # two whole verification rounds after the first token
    for _ in range(2):  # cold, then timed; neither is used
        begin = time.perf_counter()
        await probe.both_arms(batch, tokens)
    now, until = time.perf_counter(), plan.until(probe.begun, SAMPLED_UNTIL)
    least, of_each = math.ceil(verdicts.LEAST_SAMPLES / len(batch)), len(batch) / len({i for i, _ in batch})
    rounds, left = least, 0.8 * (until - now)
    for most, seconds in ((MOST_SAMPLES, left), (MOST_CHEAP_SAMPLES, min(CHEAP_S, left))):
        rounds = max(rounds, min(math.ceil(most / of_each), int(seconds / (now - begin))))
    spec: list[Sampled] = []
    plain: list[Sampled] = []
    for i in range(rounds):
        if i >= least and time.perf_counter() > until:
            break
        arms = await probe.both_arms(batch, tokens)
        spec += arms[0]
        plain += arms[1]
    return spec, plain


async def _recomputed(probe: Probe, plan: SelfTestPlan, arm: Sequence[Sampled]) -> list[float]:
    """|stated - recomputed| in nats of some of the tokens that were stated to be among the most likely."""

    async def distance(s: Sampled, t: int) -> float:
        least = max(0, probe.sampling.get("min_tokens", 0) - t)  # t of them are part of the prompt now
        params = probe.params(1, plain=True, logprobs=TOP, min_tokens=least)
        again = await probe.sample(0, [*plan.prompts[s.prompt], *s.tokens[:t]], params)
        known = dict(zip(again.top_ids[0], again.top[0], strict=True))
        return abs(float(s.logprobs[t] - known.get(s.tokens[t], again.top[0, -1])))  # at most as likely as the last

    places = [(s, t) for s in arm for t in range(1, len(s.tokens)) if s.tokens[t] in s.top_ids[t]]
    chosen = random.Random(0).sample(places, min(SCORED, len(places)))
    return await gather_or_cancel([distance(s, t) for s, t in chosen])
