"""Two tests of sampled tokens, each valid at its error level for every sample size: asymptotics say nothing at 1e-6.

Speculative sampling is exact (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), so a correct engine
gives sequences of one distribution with drafts and without (``two_sample``), and of the one that its log-probs state
(``evidence``).

``two_sample``. Under the null hypothesis the arm labels of one prompt's sequences are exchangeable given the pooled sequences, so
among all that begin alike the count of a token in one arm is hypergeometric. Two kinds of questions are asked, and which they are
is read off the *pooled* counts alone, so that Bonferroni's correction by their number holds:

- of each prompt, position and token that is frequent enough to be judged alone: Fisher's exact test (1922); the tokens too
  rare for that are one class;
- of each position: the exact form of Mantel and Haenszel's test (1959) adds up over all prefixes of all prompts how often the
  prefix's most frequent token follows. Given everything before, these counts are independent hypergeometric variables, so the
  distribution of their sum is their convolution. It sees what befalls a few positions, whatever came before: a switch of k
  (in 97 % of the engines of a simulation; Fisher's test alone in 40 %).

``evidence`` is the likelihood ratio of a fixed mixture of alternatives to the stated distribution. Its expectation is <= 1 under
the null, token by token, given everything before, so P(ratio >= 1 / alpha) <= alpha by Markov's inequality (an e-value; Grünwald,
de Heide, Koolen 2024). Half of the mixture treats tokens by their place among the likeliest; in the other half the odds of one
token are wrong, wherever it may follow, each token of the vocabulary with the same share, so that none has to be guessed. In a
simulation the first half alone sees 5 % of the engines that favour one token, the second none of those that accept a draft
unasked; both together see 77 % and 90 %.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_plugin.engine.selftest.self_test_plan import Sampled

Floats = NDArray[np.float64]
Tokens = Sequence[int]
#: of one context: followed by the token in the first arm, of so many there; the same of the second arm
Counts = tuple[int, int, int, int]
OTHER = -1  # stands for all tokens too rare to be judged alone

TEMPERED = (0.5, 0.8, 0.91, 1.1, 1.25, 2.0)  # probabilities to this power, renormalised
LEAKING = (0.01, 0.1)  # this share of the mass spread evenly over the vocabulary
PLACES = ("likeliest", "second", "third")
BOOSTED = (0.02, 0.05, 0.1, 0.3)  # this share of the mass moved to the token of a place: a draft accepted unasked
ODDS = (1 / 3, 2 / 3, 1.5, 3.0)  # of one token, times this
REST_FLOOR = 1e-5  # least mass granted to tokens outside the known top; covers float32 rounding of 1 - sum(top)


@dataclass(frozen=True)
class TwoSample:
    """Outcome of ``two_sample``."""

    p_value: float  # smallest p-value times the number of tests; reject when <= alpha
    tests: int
    worst: str  # the most deviant context, token and counts


@functools.lru_cache(maxsize=1 << 16)  # the same few sizes come again and again
def _log_choose(n: int, r: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(r + 1) - math.lgamma(n - r + 1)


def exact_p(strata: Sequence[Counts]) -> float:
    """Two-sided p-value of the sum of the first arm's counts, given all margins: of all sums that are no likelier.

    Of one stratum it is Fisher's test, of several Mantel and Haenszel's.
    """
    chances: NDArray[np.floating] = np.ones(1)
    low = 0
    for x_a, n_a, x_b, n_b in strata:
        total, marked = n_a + n_b, x_a + x_b
        least, every = max(0, n_a + marked - total), _log_choose(total, n_a)
        support = range(least, min(n_a, marked) + 1)
        each = [_log_choose(marked, x) + _log_choose(total - marked, n_a - x) - every for x in support]
        chances = np.convolve(chances, np.exp(each))
        low += least
    observed = chances[sum(s[0] for s in strata) - low]
    return min(1.0, float(chances[chances <= observed * (1 + 1e-9)].sum()))


def _frequent(arm_a: Sequence[Tokens], arm_b: Sequence[Tokens], t: int, least: int) -> Iterator[tuple[str, Counts]]:
    """Of each token at this position of one prompt: its name and counts. ``least``: occurrences that can be judged."""
    arms = [[s[t] for s in arm if len(s) > t] for arm in (arm_a, arm_b)]
    both = Counter(itertools.chain(*arms))
    a, b = (Counter(token if both[token] >= least else OTHER for token in arm) for arm in arms)
    n_a, n_b = a.total(), b.total()
    for token in sorted(a | b):
        if least <= a[token] + b[token] <= n_a + n_b - least:
            name = "the rare tokens" if token == OTHER else f"token {token}"
            yield f"{name} {a[token]}/{n_a} against {b[token]}/{n_b}", (a[token], n_a, b[token], n_b)


def _by_prefix(arm_a: Sequence[Tokens], arm_b: Sequence[Tokens], t: int) -> Iterator[Counts]:
    """Of each prefix of one prompt that both arms have and that leaves a choice: counts of its most frequent token."""
    following: dict[tuple[int, ...], tuple[Counter[int], Counter[int]]] = defaultdict(lambda: (Counter(), Counter()))
    for arm, sequences in enumerate((arm_a, arm_b)):
        for s in sequences:
            if len(s) > t:
                following[tuple(s[:t])][arm][s[t]] += 1
    for a, b in following.values():
        if a and b and len(both := a + b) > 1:
            mode = min(both, key=lambda token: (-both[token], token))
            yield a[mode], a.total(), b[mode], b.total()


def two_sample(arm_a: Sequence[Sequence[Tokens]], arm_b: Sequence[Sequence[Tokens]], alpha: float) -> TwoSample:
    """Are the sequences of the two arms draws from one distribution? Rejects a true null with probability <= alpha.

    Args:
        arm_a: ``arm_a[i]`` are the sampled token sequences of prompt i in the first arm; their first tokens are not compared,
            since these come from the prompt's own forward pass.
        arm_b: the same prompts in the second arm.
        alpha: error level of the whole test.
    """
    prompts = list(zip(arm_a, arm_b, strict=True))
    least = 1 + math.ceil(math.log2(1 / alpha))  # of fewer no split of equal arms reaches alpha
    p_values: dict[str, float] = {}
    for t in range(1, max((len(s) for a, b in prompts for s in (*a, *b)), default=0)):
        for i, (a, b) in enumerate(prompts):
            p_values |= {f"prompt {i} t={t}: {name}": exact_p([c]) for name, c in _frequent(a, b, t, least)}
        if strata := [c for a, b in prompts for c in _by_prefix(a, b, t)]:
            x_a, n_a, x_b, n_b = (sum(column) for column in zip(*strata, strict=True))
            name = f"all prompts t={t}: the likeliest tokens {x_a}/{n_a} against {x_b}/{n_b}"
            p_values[name] = exact_p(strata)
    if not p_values:
        return TwoSample(1.0, 0, "every context has but one token that follows")
    worst = min(p_values, key=p_values.__getitem__)
    corrected = min(1.0, p_values[worst] * len(p_values))
    return TwoSample(corrected, len(p_values), f"{worst}, p={p_values[worst]:.1e}")


@dataclass(frozen=True)
class Evidence:
    """Outcome of ``evidence``."""

    log_ratio: float  # natural log of the likelihood ratio; reject when >= log(1 / alpha)
    tokens: int
    alternative: str  # the alternative that fits best


def evidence(arm: Sequence[Sampled], vocab_size: int) -> Evidence:
    """Likelihood ratio of the mixture to the stated distribution; under the null, P(ratio >= 1/alpha) <= alpha.

    Of all tokens with a finite log-prob but each sequence's first, which comes from the prompt's own forward pass.
    """
    tokens, stated, top, top_ids = (
        np.concatenate([np.asarray(getattr(s, name))[1:] for s in arm])
        for name in ("tokens", "logprobs", "top", "top_ids")
    )
    good = np.isfinite(stated) & ~np.isnan(top).any(1)
    stated, top, top_ids = stated[good], top[good], top_ids[good]
    hit = top_ids == tokens[good, None]  # [N, n] was this token sampled
    by_place = dict(_by_place(stated, top, hit, vocab_size))
    logs, odds = np.array([*by_place.values()]), _by_token(top, top_ids, hit, vocab_size)
    peak = float(max(logs.max(), odds.max()))
    mixed = peak + math.log(0.5 * np.exp(logs - peak).mean() + 0.5 * np.exp(odds - peak).mean())
    best = max(by_place, key=by_place.__getitem__)
    if odds.max() > logs.max():
        i, token = np.unravel_index(int(odds.argmax()), odds.shape)
        best = f"odds of one token (number {token}) times {ODDS[int(i)]:.2g}"
    return Evidence(mixed, len(stated), best)


def _by_place(stated: Floats, top: Floats, hit: NDArray[np.bool_], vocab_size: int) -> Iterator[tuple[str, float]]:
    """Name and log-ratio of each alternative that treats tokens by their place."""
    p, in_top = np.exp(top), hit.any(1)
    rest = np.maximum(1.0 - p.sum(axis=1), REST_FLOOR)  # outside the top; never less than it is: a ratio errs downwards
    own = np.where(in_top, stated, np.log(rest))
    for power in TEMPERED:
        scale = np.log(np.power(p, power).sum(axis=1) + np.power(rest, power))
        yield f"temperature x{1 / power:.2g}", float(((power - 1.0) * own - scale).sum())
    for leak in LEAKING:
        share = np.where(in_top, 1.0, vocab_size - np.isfinite(top).sum(axis=1)) / vocab_size
        yield f"{leak:.0%} of the mass elsewhere", float(np.log(1.0 - leak + leak * share / np.exp(own)).sum())
    for name, chances, taken in zip(PLACES, p.T, hit.T, strict=False):
        possible = chances > 0
        for boost in BOOSTED:
            ratio = 1.0 - boost + boost * taken[possible] / chances[possible]
            yield f"{boost:.0%} of the mass moved to the {name} token", float(np.log(ratio).sum())


def _by_token(top: Floats, top_ids: NDArray[np.int64], hit: NDArray[np.bool_], vocab_size: int) -> Floats:
    """[ODDS, V] log-ratios; 0 for a token that is in no top."""
    known = (top_ids >= 0) & np.isfinite(top)
    drawn, ids, chances = np.bincount(top_ids[hit], minlength=vocab_size), top_ids[known], np.exp(top[known])
    return np.stack([drawn * math.log(o) - np.bincount(ids, np.log1p((o - 1.0) * chances), vocab_size) for o in ODDS])
