"""Are these differences larger than those: the two tests of the provenance guard, both exact whatever the differences are like.

How many of n windows lie above the r-th smallest of m others is negative hypergeometric when all come from one distribution
(Gumbel & von Schelling 1950; Wilks 1942).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spec_plugin.policy.provenance.rules import QUANTILE


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


def exceedance_test(
    values: Sequence[float], reference: Sequence[float], factor: float, floor: float
) -> tuple[float, float]:
    """Are too many values above the reference's ninth decile, or above its largest: many a little worse, or some worse than all.

    Args:
        values: one of each window.
        reference: the same of plain windows, at least one.
        factor: honest values are no larger than this times the reference.
        floor: nats; a value below counts as none.

    Returns:
        The p-value, of both looks together, for "no larger than that", and the bound in nats that decided.
    """
    ordered, m, n = sorted(reference), len(reference), len(values)
    looks = []
    for r in (math.ceil(QUANTILE * m), m):
        bound = max(factor * ordered[r - 1], floor)
        above = sum(v > bound for v in values)
        looks.append((min(1.0, 2 * exceedance_p(above, n, r, m)), bound))
    return min(looks, key=lambda look: look[0])


def share_test(values: Sequence[float], bound: float) -> tuple[float, float]:
    """Are more than a tenth of the values beyond a fixed bound: the p-value for "no more", and the bound."""
    return binomial_p(sum(v > bound for v in values), len(values), 1.0 - QUANTILE), bound
