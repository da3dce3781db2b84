"""How far two sources of the same log-probs are apart, and whether that is more than this run's own plain requests show.

Engine and actor compute one model with different kernels and batch shapes: their log-probs differ by rounding, and how much
depends on model, dtype, temperature, kernels and text. So a run is measured against itself: plain requests show what is
rounding. Differences of bfloat16 models have heavy tails (single tokens are nats off) and those of one sequence hang
together, so neither a token nor one sequence is evidence. The unit is a *window* of a response, one of each sequence where
there are enough, with the mean and the largest difference in it.

The test asks how many windows lie above the ninth decile of the plain ones, and above the largest, times a factor for honest
differences between the kernels of plain and verifying steps. The distribution of these numbers is known exactly whatever the
differences are like (exceedances are negative hypergeometric: Gumbel & von Schelling 1950; Wilks 1942).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: windows of a batch that are looked at: two of each sequence where there are no more sequences than half of that, else one
WINDOWS = 32
#: tokens of a window
LONGEST, SHORTEST = 64, 8
#: which of the plain windows the others are compared with, beside the largest: this share lies below
_QUANTILE = 0.9


@dataclass(frozen=True)
class Windows:
    """Differences |a - b| in windows of responses, in nats."""

    means: tuple[float, ...] = ()
    maxima: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.means)

    def __add__(self, other: Windows) -> Windows:
        return Windows(self.means + other.means, self.maxima + other.maxima)


@dataclass(frozen=True)
class Spread:
    """Differences |a - b| of all tokens of a batch, in nats."""

    mean: float = 0.0
    most: float = 0.0  # 99.99 % are no larger
    max: float = 0.0
    far: float = 0.0  # share of tokens beyond a bound
    tokens: int = 0


def difference(recomputed: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """|rollout - recomputed| under the mask, else zero, [B, T]: a product would keep NaN from padding."""
    return (rollout - recomputed).abs().masked_fill(~mask, 0.0)


def spread(diff: Tensor, mask: Tensor, far: float) -> Spread:
    """Of differences [B, T] under a mask [B, T]; ``far`` in nats."""
    values = diff[mask]
    if values.numel() == 0:
        return Spread()
    n = values.numel()
    most = float(values.kthvalue(max(1, math.ceil(0.9999 * n))).values)
    share = float((values > far).double().mean())
    return Spread(float(values.double().mean()), most, float(values.max()), share, n)


def windows(diff: Tensor, mask: Tensor, rng: random.Random) -> Windows:
    """Windows of the responses of a batch.

    Each sequence gives one, at random, or two where there are few: what a single odd text does must not count often.
    Responses shorter than a window are put together, in their order, until they make one; a rest says nothing.

    Args:
        diff: [B, T] differences.
        mask: [B, T] bool, True at tokens that count.
        rng: places the windows.
    """
    rows = [row[keep] for row, keep in zip(diff, mask, strict=True)]
    rows = _joined([row for row in rows if len(row)])
    each = 2 if len(rows) <= WINDOWS // 2 else 1
    pieces = [piece for row in rows for piece in _pieces(row, each, rng)]
    return Windows(tuple(float(p.double().mean()) for p in pieces), tuple(float(p.max()) for p in pieces))


def _joined(rows: Sequence[Tensor]) -> list[Tensor]:
    out, short = [], []
    for row in rows:
        if len(row) >= SHORTEST:
            out.append(row)
            continue
        short.append(row)
        if sum(map(len, short)) >= SHORTEST:
            out.append(torch.cat(short))
            short = []
    return out


def _pieces(row: Tensor, most: int, rng: random.Random) -> Iterator[Tensor]:
    count = max(1, min(most, len(row) // SHORTEST))
    room = len(row) // count
    size = min(room, LONGEST)
    for i in range(count):
        start = i * room + rng.randrange(room - size + 1)
        yield row[start : start + size]


def exceedance_p(above: int, n: int, r: int, m: int) -> float:
    """P(at least ``above`` of n lie above the r-th smallest of m), when all n + m come from one distribution; exact."""
    if above <= 0:
        return 1.0
    total = _log_choose(n + m, m)
    terms = (_log_choose(n - i + r - 1, r - 1) + _log_choose(i + m - r, m - r) - total for i in range(above, n + 1))
    return min(1.0, math.fsum(map(math.exp, terms)))


def binomial_p(above: int, n: int, chance: float) -> float:
    """P(at least ``above`` of n), each with this chance."""
    if above <= 0:
        return 1.0
    log_p, log_q = math.log(chance), math.log1p(-chance)
    terms = (_log_choose(n, i) + i * log_p + (n - i) * log_q for i in range(above, n + 1))
    return min(1.0, math.fsum(map(math.exp, terms)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


@dataclass(frozen=True)
class Verdict:
    """Are these windows worse than others."""

    p_value: float
    bound: float  # nats
    above: int  # windows beyond it
    of: int


def compared(values: Sequence[float], plain: Sequence[float], factor: float, least: float) -> Verdict:
    """Are the values larger than ``factor`` times the plain ones: p-value for "no larger than that", exact.

    Args:
        values: of one kind, for each window.
        plain: the same of plain windows, at least one.
        factor: honest differences are no larger.
        least: nats; a value below counts as none.
    """
    ordered, m, n = sorted(plain), len(plain), len(values)
    found = []
    for r in (math.ceil(_QUANTILE * m), m):  # many that are a little worse, or some that are worse than all
        bound = max(factor * ordered[r - 1], least)
        above = sum(v > bound for v in values)
        found.append(Verdict(min(1.0, 2 * exceedance_p(above, n, r, m)), bound, above, n))
    return min(found, key=lambda v: v.p_value)


def judged(values: Sequence[float], bound: float) -> Verdict:
    """Are more than a tenth of the values beyond a fixed bound: p-value for "no more", exact."""
    above = sum(v > bound for v in values)
    return Verdict(binomial_p(above, len(values), 1.0 - _QUANTILE), bound, above, len(values))


def median(values: Sequence[float]) -> float:
    """The lower median; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
