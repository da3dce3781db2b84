"""Are two sets of sampled sequences draws from one and the same model: token counts, of the start-up self-test.

Speculative sampling is exact (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), so a correct
engine gives sequences with the *same distribution* with and without a draft. This test and that of
``spec_plugin.engine.selftest.evidence`` are valid for every sample size (no asymptotics: at an error level of 1e-6 those cannot
be trusted).

Under the null hypothesis the arm labels of one prompt's sequences are exchangeable given the pooled sequences, so among all
that begin alike the count of a token in one arm is hypergeometric. Two kinds of questions are asked, K in all, and which they
are is read off the *pooled* counts alone, so that Bonferroni's correction by K holds:

- of each prompt, position and token that is frequent enough to be judged alone: Fisher's exact test (1922); the tokens too
  rare for that are one class;
- of each position: the exact form of Mantel and Haenszel's test (1959) adds up over all prefixes of all prompts how often the
  prefix's most frequent token follows. Given everything before, these counts are independent hypergeometric variables, so the
  distribution of their sum is their convolution. It sees what befalls a few positions, whatever came before: a switch of k.
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

Tokens = Sequence[int]
#: of one context: followed by the token in the first arm, of so many there; the same of the second arm
Counts = tuple[int, int, int, int]
OTHER = -1  # stands for all tokens too rare to be judged alone


@dataclass(frozen=True)
class TwoSample:
    """Outcome of ``two_sample``."""

    p_value: float  # smallest p-value times the number of tests; reject when <= alpha
    tests: int  # K
    sequences: int  # in both arms together
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


def two_sample(
    arm_a: Sequence[Sequence[Tokens]], arm_b: Sequence[Sequence[Tokens]], alpha: float, first: int = 1
) -> TwoSample:
    """Are the sequences of the two arms draws from one distribution? Rejects a true null with probability <= alpha.

    Args:
        arm_a: ``arm_a[i]`` are the sampled token sequences of prompt i in the first arm.
        arm_b: the same prompts in the second arm.
        alpha: error level of the whole test.
        first: first position compared; 1 by default, because the token at 0 comes from the prompt's own forward pass.
    """
    prompts = list(zip(arm_a, arm_b, strict=True))
    sequences = sum(len(a) + len(b) for a, b in prompts)
    least = 1 + math.ceil(math.log2(1 / alpha))  # of fewer no split of equal arms reaches alpha
    p_values: dict[str, float] = {}
    for t in range(first, max((len(s) for a, b in prompts for s in (*a, *b)), default=0)):
        for i, (a, b) in enumerate(prompts):
            p_values |= {f"prompt {i} t={t}: {name}": exact_p([c]) for name, c in _frequent(a, b, t, least)}
        if strata := [c for a, b in prompts for c in _by_prefix(a, b, t)]:
            x_a, n_a, x_b, n_b = (sum(column) for column in zip(*strata, strict=True))
            name = f"all prompts t={t}: the likeliest tokens {x_a}/{n_a} against {x_b}/{n_b}"
            p_values[name] = exact_p(strata)
    if not p_values:
        return TwoSample(1.0, 0, sequences, "every context has but one token that follows")
    worst = min(p_values, key=p_values.__getitem__)
    corrected = min(1.0, p_values[worst] * len(p_values))
    return TwoSample(corrected, len(p_values), sequences, f"{worst}, p={p_values[worst]:.1e}")
