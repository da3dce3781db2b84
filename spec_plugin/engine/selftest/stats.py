"""The mathematics of the start-up self-test: are two sets of sampled sequences draws from one and the same model?

Speculative sampling is exact (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), so a correct
engine gives sequences with the *same distribution* with and without a draft. Two tests say how surely it does, this one and
``spec_plugin.engine.selftest.evidence``, both valid for every sample size (no asymptotics: at an error level of 1e-6 those
cannot be trusted).

``two_sample`` compares token counts of the two arms. Under the null hypothesis the arm labels of one prompt's sequences are
exchangeable given the pooled sequences, so in each context the count of a token in one arm is hypergeometric: Fisher's
exact test (Fisher 1922). A context is either a prefix (the next token of all sequences that begin alike) or a position (the
token at t, whatever came before). Which contexts and tokens are tested, and how many (K), is read off the *pooled* counts
alone: those whose smallest attainable p-value is below alpha / K (Tarone 1990). The tokens too rare to be tested alone are
tested as one class. Besides, for each position, the exact form of Mantel and Haenszel's test (1959) adds up over all
prefixes of all prompts how often the prefix's most frequent token follows: given everything before, these counts are
independent hypergeometric variables, so the distribution of their sum is their convolution.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int]
OTHER = -1  # stands for all tokens too rare to be tested alone


@dataclass(frozen=True)
class TwoSample:
    """Outcome of ``two_sample``."""

    p_value: float  # smallest p-value times the number of tests; reject when <= alpha
    tests: int  # K, (context, token) pairs that were tested
    sequences: int  # in both arms together
    detects: float  # difference in a token's probability that the most visited context would show
    worst: str  # the most deviant context, token and counts


@dataclass(frozen=True)
class _Count:
    where: str
    token: int
    n_a: int  # visits of the context in arm a
    n_b: int
    x_a: int  # of them followed by the token
    x_b: int


@functools.lru_cache(maxsize=1 << 16)  # the same few sizes come again and again
def log_choose(n: int, r: int) -> float:
    """Natural log of the binomial coefficient."""
    return math.lgamma(n + 1) - math.lgamma(r + 1) - math.lgamma(n - r + 1)


def _log_hypergeometric(total: int, marked: int, drawn: int, x: int) -> float:
    return log_choose(marked, x) + log_choose(total - marked, drawn - x) - log_choose(total, drawn)


def fisher_exact(x_a: int, n_a: int, x_b: int, n_b: int) -> float:
    """Two-sided p-value of Fisher's exact test: x_a of n_a against x_b of n_b (sum of all outcomes no likelier)."""
    total, marked = n_a + n_b, x_a + x_b
    support = range(max(0, n_a + marked - total), min(n_a, marked) + 1)
    observed = _log_hypergeometric(total, marked, n_a, x_a)
    logs = [_log_hypergeometric(total, marked, n_a, x) for x in support]
    return min(1.0, sum(math.exp(v) for v in logs if v <= observed + 1e-9))


def mantel_haenszel_exact(strata: Sequence[tuple[int, int, int, int]]) -> float:
    """Two-sided p-value of the sum of x_a over strata (x_a, n_a, x_b, n_b), exact and conditional on all margins."""
    chances: NDArray[np.floating] = np.ones(1)
    low = 0
    for x_a, n_a, x_b, n_b in strata:
        total, marked = n_a + n_b, x_a + x_b
        least = max(0, n_a + marked - total)
        support = range(least, min(n_a, marked) + 1)
        chances = np.convolve(chances, [math.exp(_log_hypergeometric(total, marked, n_a, x)) for x in support])
        low += least
    observed = chances[sum(s[0] for s in strata) - low]
    return min(1.0, float(chances[chances <= observed * (1 + 1e-9)].sum()))


@functools.lru_cache(maxsize=1 << 16)
def smallest_p(total: int, marked: int, share_a: float) -> float:
    """Smallest p-value that Fisher's test could give in a context of this pooled size, arms split as designed."""
    drawn = round(total * share_a)
    extremes = (max(0, drawn + marked - total), min(drawn, marked))
    return math.exp(min(_log_hypergeometric(total, marked, drawn, x) for x in extremes))


def tarone(smallest: Sequence[float], alpha: float) -> int:
    """Tarone's K: the least number with at most K hypotheses that could reach alpha / K."""
    ordered = np.sort(np.asarray(smallest, dtype=np.float64))
    k = 1
    while np.searchsorted(ordered, alpha / k, side="right") > k:
        k += 1
    return k


def contexts(sequences: Sequence[Tokens], first: int, least: int) -> Iterator[tuple[str, list[int], int]]:
    """All contexts with at least ``least`` sequences: (name, indices of its sequences, position of the token to compare)."""
    groups = [list(range(len(sequences)))]  # equal up to where they were split last
    for t in range(first, max((len(s) for s in sequences), default=0)):
        everyone = [i for i, s in enumerate(sequences) if len(s) > t]
        if len(everyone) >= least:
            yield f"t={t}", everyone, t
        begin = 0 if t == first else t - 1
        groups = [part for group in groups for part in _split(sequences, group, begin, t) if len(part) >= least]
        for group in groups:
            if len(group) < len(everyone):
                yield f"t={t} after {list(sequences[group[0]][:t])[-4:]}", group, t


def _split(sequences: Sequence[Tokens], group: Sequence[int], begin: int, t: int) -> Iterable[list[int]]:
    """Those of the group that are longer than t, by their tokens from ``begin`` to t."""
    parts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i in group:
        if len(sequences[i]) > t:
            parts[tuple(sequences[i][begin:t])].append(i)
    return parts.values()


def _pairs(arm_a: Sequence[Tokens], arm_b: Sequence[Tokens], name: str, first: int, alpha: float) -> Iterator[_Count]:
    pooled, share_a = [*arm_a, *arm_b], len(arm_a) / max(1, len(arm_a) + len(arm_b))
    least = 2 + math.ceil(math.log2(1 / alpha))  # below it no split of the arms can reach alpha
    for where, group, t in contexts(pooled, first, least):
        tokens = [pooled[i][t] for i in group]
        counts = Counter(tokens)
        rare = {a for a, n in counts.items() if smallest_p(len(group), n, share_a) > alpha}
        classes = Counter(OTHER if a in rare else a for a in tokens)
        in_a = Counter(OTHER if a in rare else a for i, a in zip(group, tokens, strict=True) if i < len(arm_a))
        n_a = sum(in_a.values())
        if len(classes) == 2:
            classes = Counter({classes.most_common(1)[0][0]: classes.most_common(1)[0][1]})  # both say the same
        for token, total in classes.items():
            if total < len(group):
                yield _Count(f"{name} {where}", token, n_a, len(group) - n_a, in_a[token], total - in_a[token])


def _modes(
    arm_a: Sequence[Tokens], arm_b: Sequence[Tokens], first: int
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """For each prefix with a choice: (position, counts of its most frequent token in both arms)."""
    pooled = [*arm_a, *arm_b]
    for where, group, t in contexts(pooled, first, 2):
        counts = Counter(pooled[i][t] for i in group)
        if len(counts) > 1 and " after " in where:
            mode = min(counts, key=lambda token: (-counts[token], token))
            n_a = sum(i < len(arm_a) for i in group)
            x_a = sum(pooled[i][t] == mode for i in group if i < len(arm_a))
            yield t, (x_a, n_a, counts[mode] - x_a, len(group) - n_a)


def _by_position(arm_a: Sequence[Sequence[Tokens]], arm_b: Sequence[Sequence[Tokens]], first: int) -> dict[str, float]:
    """p-value of the most frequent tokens' sum at each position, all prompts together."""
    strata: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for a, b in zip(arm_a, arm_b, strict=True):
        for t, counts in _modes(a, b, first):
            strata[t].append(counts)
    found = {}
    for t, s in strata.items():
        x_a, n_a, x_b, n_b = (sum(column) for column in zip(*s, strict=True))
        found[f"all prompts t={t}: the likeliest tokens {x_a}/{n_a} against {x_b}/{n_b}"] = mantel_haenszel_exact(s)
    return found


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
    sequences = sum(map(len, arm_a)) + sum(map(len, arm_b))
    prompts = enumerate(zip(arm_a, arm_b, strict=True))
    pairs = [c for i, (a, b) in prompts for c in _pairs(a, b, f"prompt {i}", first, alpha)]
    p_values = _by_position(arm_a, arm_b, first)
    share = sum(map(len, arm_a)) / max(1, sequences)
    attainable = [smallest_p(c.n_a + c.n_b, c.x_a + c.x_b, share) for c in pairs]
    k = tarone([*attainable, *(0.0 for _ in p_values)], alpha)
    most = 0
    for c, p in zip(pairs, attainable, strict=True):
        if p <= alpha / k:
            most = max(most, min(c.n_a, c.n_b))
            token = "the rare tokens" if c.token == OTHER else f"token {c.token}"
            name = f"{c.where}: {token} {c.x_a}/{c.n_a} against {c.x_b}/{c.n_b}"
            p_values[name] = fisher_exact(c.x_a, c.n_a, c.x_b, c.n_b)
    if not p_values:
        return TwoSample(1.0, 0, sequences, 1.0, "every context has but one token that follows")
    worst = min(p_values, key=p_values.__getitem__)
    detects = math.sqrt(math.log(2 * k / alpha) / most) if most else 1.0
    return TwoSample(
        min(1.0, p_values[worst] * k), k, sequences, min(1.0, detects), f"{worst}, p={p_values[worst]:.1e}"
    )
