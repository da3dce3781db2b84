"""From samples to the checks of the self-test: pure functions, one line of numbers each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from spec_plugin.api.events import Check
from spec_plugin.engine.selftest.self_test_plan import Sampled
from spec_plugin.engine.selftest.stats import evidence, two_sample

LEAST_SAMPLES = 64  # sequences in each arm, below which the self-test fails for want of evidence


def tolerance(dtype: torch.dtype) -> float:
    """Difference of two log-probs in nats that rounding explains: two steps of a logit, at least 1e-3.

    Logits of language models are about 16 to 32, where neighbouring numbers are 16 to 32 eps / 2 apart: 0.25 for bfloat16, 0.031
    for float16; float32 gets a floor of 1e-3 for sums in another order.
    """
    return max(1e-3, 32 * float(torch.finfo(dtype).eps))


def agreed(a: Sampled, b: Sampled) -> int:
    """Number of tokens that two sequences of one length begin with alike."""
    pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a.tokens))


def greedy_check(spec: Sequence[Sampled], plain: Sequence[Sampled], limit: float, name: str = "greedy") -> Check:
    """At temperature 0 both arms give the same tokens, up to ties of at most ``limit`` nats at the first difference."""
    gaps: list[float] = []
    wrong: list[str] = []
    for s, p in zip(spec, plain, strict=True):
        if (t := agreed(s, p)) == len(p.tokens):
            continue
        known = dict(zip(p.top_ids[t], p.top[t], strict=True))
        lowest = min(filter(math.isfinite, known.values()), default=-math.inf)  # an unknown token is at most as likely
        gaps.append(float(p.logprobs[t] - known.get(s.tokens[t], lowest)))
        if not gaps[-1] <= limit:
            which = f"prompt {s.prompt} position {t}: {s.tokens[t]} instead of {p.tokens[t]}"
            wrong.append(f"; first wrong: {which} (gap {gaps[-1]:.3g} nats)")
    same, ties = len(spec) - len(gaps), len(gaps) - len(wrong)
    detail = f"{same}/{len(spec)} identical, {ties} ties within {limit:.2g} nats{''.join(wrong[:1])}"
    return Check(name, not wrong, detail)


def greedy_limit(noise: Sequence[float], tolerance: float) -> float:
    """Largest gap of a tie, where plain requests in batches of different shapes differ by ``noise``.

    A correct engine's draft can only make the wrong token win if the noise of that place is larger than the gap. Noise beyond
    seven times its root mean square has a chance of 3e-12 where it is normal; three times the largest of hundreds covers
    heavier tails; the tolerance covers rounding that has not shown itself.
    """
    values = np.abs(np.array(noise, dtype=np.float64))
    if not values.size:
        return tolerance
    return tolerance + max(7.0 * float(np.sqrt((values**2).mean())), 3.0 * float(values.max()))


def greedy_noise(one: Sequence[Sampled], two: Sequence[Sampled]) -> list[float]:
    """Differences, in nats, in how far the two best tokens are apart, between the same requests as long as they go together."""
    noise = []
    for a, b in zip(one, two, strict=True):
        for t in range(min(agreed(a, b) + 1, len(a.tokens))):
            there = dict(zip(b.top_ids[t], b.top[t], strict=True))
            best = a.top_ids[t, :2]
            if len(best) == 2 and all(token in there for token in best):
                noise.append(float(a.top[t, 0] - a.top[t, 1] - (there[best[0]] - there[best[1]])))
    return noise


def finite_check(spec: Sequence[Sampled], plain: Sequence[Sampled]) -> Check:
    """No stated log-prob is NaN or infinite."""
    wrong = [
        f"; first: {name} sequence {i} (prompt {s.prompt}) position {t}: {s.logprobs[t]}"
        for name, arm in (("speculating", spec), ("plain", plain))
        for i, s in enumerate(arm)
        for t in np.flatnonzero(~np.isfinite(s.logprobs))
    ]
    total = sum(len(s.tokens) for s in (*spec, *plain))
    return Check("finite", not wrong, f"{len(wrong)} of {total} log-probs not finite{''.join(wrong[:1])}")


def counts_check(
    spec: Sequence[Sampled], plain: Sequence[Sampled], alpha: float, name: str = "samples: counts"
) -> Check:
    """Token counts of the two arms come from one distribution."""
    prompts = sorted({s.prompt for s in spec})
    a, b = ([[s.tokens for s in arm if s.prompt == i] for i in prompts] for arm in (spec, plain))
    r = two_sample(a, b, alpha)
    found = f"p={r.p_value:.1e} after correction for {r.tests} tests on {len(spec) + len(plain)} sequences"
    detail = f"{found} (rejects at {alpha:.1e}); {r.worst}"
    same, few = r.p_value > alpha, min(len(spec), len(plain)) < LEAST_SAMPLES
    if few:
        why = f"fewer than {LEAST_SAMPLES} sequences an arm in the time limit prove nothing, allow more time"
        detail = f"{why}; {detail}"
    return Check(name, same and not few, detail, out_of_time=same and few)


def evidence_check(spec: Sequence[Sampled], plain: Sequence[Sampled], vocab_size: int, alpha: float) -> Check:
    """The speculating arm's tokens come from the distribution that its log-probs state.

    When the *plain* arm does not either, the stated log-probs are not those of the sampler, drafts or none: the engine samples
    wrongly, or by an option that we do not know of. The run would be no better without the flag, so it is not refused; but
    that samples follow the stated distribution is unproven, and said to be.
    """
    r, base, most = evidence(spec, vocab_size), evidence(plain, vocab_size), -math.log(alpha)
    detail = f"ln(ratio)={r.log_ratio:.1f} (rejects at {most:.1f}) on {r.tokens} tokens; plain {base.log_ratio:.1f}"
    if base.log_ratio >= most:
        found = f"unproven: plain requests, too, deviate from their own stated log-probs; looks like {base.alternative}"
        return Check("samples: log-probs", True, f"{found}: {detail}", unproven=True)
    passed = r.log_ratio < most
    return Check("samples: log-probs", passed, detail if passed else f"{detail}; looks like {r.alternative}")


def not_stated(logprobs_mode: str, sampling: Mapping[str, Any]) -> Check | None:
    """In place of ``evidence_check`` where the engine states other log-probs than it samples by; None where it does not.

    They are the same where they are processed ones, or raw ones and the sampling options leave nothing to process.
    """
    nothing = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (0, -1)}
    raw = logprobs_mode == "raw_logprobs" and all(v in nothing.get(name, ()) for name, v in sampling.items())
    if raw or logprobs_mode == "processed_logprobs":
        return None
    detail = (
        f"unproven: logprobs_mode={logprobs_mode} with {dict(sampling)} states other log-probs than tokens are sampled by, so "
        "only counts are compared; logprobs_mode=processed_logprobs would prove it"
    )
    return Check("samples: log-probs", True, detail, unproven=True)


def logprob_check(name: str, spec: Sequence[float], plain: Sequence[float], tolerance: float, strays: int = 0) -> Check:
    """Stated and recomputed log-probs agree; each entry is |stated - recomputed| of one sampled token.

    The mean may be tolerance / 4 and the largest 4 * tolerance, or four times what *plain* requests show on this engine, up
    to ten times as much: kernels differ with the shape of a batch, for plain requests as well. A token at the very edge of
    top_p or top_k may by rounding fall out of it in the recomputation (infinite): one in eight may. The ``strays`` largest of
    the others may be anything, as where rounding turns a choice of experts.
    """
    if not spec or not plain:
        numbers = f"nothing to compare: {len(spec)} speculating, {len(plain)} plain tokens"
        return Check(name, False, numbers, out_of_time=True)
    a, b = np.array(spec), np.array(plain)
    inside, base = a[~np.isinf(a)], b[np.isfinite(b)] if np.isfinite(b).any() else np.zeros(1)
    filtered, largest = len(a) - len(inside), np.sort(inside)[::-1]  # a NaN comes first
    judged = largest if np.isnan(largest).any() or len(largest) <= strays else largest[strays:]
    mean, most = (float(judged.mean()), float(judged[0])) if judged.size else (math.inf, math.inf)
    mean_limit, max_limit = _limit(tolerance / 4, float(base.mean())), _limit(4 * tolerance, float(base.max()))
    passed = mean <= mean_limit and most <= max_limit and 8 * filtered <= len(a)  # a NaN compares false
    but, top = f" for all but {strays}" if strays else "", float(largest[0]) if largest.size else math.inf
    detail = (
        f"{len(a)} tokens, |stated - recomputed| mean {mean:.2g} (limit {mean_limit:.2g}) max {top:.2g} (limit {max_limit:.2g}"
        f"{but}), {filtered} outside the filter; plain: {len(b)} tokens, mean {b.mean():.2g} max {b.max():.2g}"
    )
    return Check(name, passed, detail)


def _limit(own: float, plain: float) -> float:
    return min(max(own, 4 * plain), 10 * own)


def path_check(before: Mapping[str, Any], after: Mapping[str, Any]) -> Check:
    """What the draft did meanwhile; without accepted tokens the accepting half of the sampler was not exercised."""
    drafts, proposed, accepted = (after[n] - before[n] for n in ("drafts", "draft_tokens", "accepted_tokens"))
    if not drafts:
        return Check("speculation", False, "no draft was verified (or the engine keeps no counters: disable_log_stats)")
    found = f"{accepted} accepted tokens of {proposed} drafted, acceptance length {1 + accepted / drafts:.2f}"
    return Check("speculation", True, f"acceptance path exercised: {found}")
