"""A capital that is bet on statistics of mean zero: a correct run raises it to 1 / a, ever, with a chance of a at most.

Each *cell* holds a part of the capital and bets a fixed share of it, on one statistic, one way, at one kind of place. Before each
token a cell's expected growth is 1, so the mean of all cells is a test martingale, and Ville's inequality bounds its largest
value, whenever one looks (Shafer, Testing by betting, JRSS A 2021; Ramdas et al., arXiv 2210.01948). Cells are averaged: the
largest of them is no evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spec_plugin.policy.exactness.statistics import NAMES

Floats = NDArray[np.float64]

#: Two capitals, by what their cells bet on. WEIGHED: w f with w = p(y) / p'(y), whose mean is exactly zero if the engine samples
#: from the p' that it states, whatever rounding, other experts or a lag make of p. PLAIN: f, for what is sampled *and* stated
#: wrong, beyond what rounding is allowed: no proof, since nobody knows a bound for that.
WEIGHED, PLAIN = 0, 1
DESIGNS = 2
#: first tokens, by their number in a response, of the bands that have cells of their own, beside those of all places: a fault
#: that begins late in a text must not drown in what came before
BANDS = (0, 256, 1024, 4096)
#: Shares that are bet on each statistic, both ways, and none: that part of the capital is kept for faults that begin later. On
#: what hardly occurs many times as much is bet, one way.
_BOTH = [0.0, *(sign * 0.0025 * 2.0**power for power in range(8) for sign in (1.0, -1.0))]
_ONE = [0.0, *(0.0025 * 2.0**power for power in range(16))]
BETS = np.array([_BOTH, _BOTH, _BOTH, _ONE])
SHAPE = (DESIGNS, 1 + len(BANDS), *BETS.shape)
#: a token that is stated to be as good as impossible weighs so much: infinity times 0 would make all evidence no number
_HEAVIEST = 1e300
#: a cell that has lost goes on with so much of what it had
_LEAST = 1e-3
#: phases behind which the share that moves between cells begins to fall
_SETTLED = 32


@dataclass(frozen=True)
class Capital:
    """Log of what each cell holds, in units of what it had at first, and what that has come from."""

    logs: Floats  # [designs, places, statistics, bets]
    tokens: int = 0
    phases: int = 0

    @classmethod
    def new(cls) -> Capital:
        """One unit in each cell."""
        return cls(np.zeros(SHAPE))

    def log10(self, design: int) -> float:
        """Of one capital, as a multiple of what it began with: 7 is a chance of 1e-7 at most in a correct run."""
        return _log_mean(self.logs[design]) / math.log(10.0)

    def richest(self, design: int) -> str:
        """What the cell bets on that holds most, for a message."""
        place, statistic, _ = np.unravel_index(int(self.logs[design].argmax()), SHAPE[1:])
        return NAMES[statistic] + (f", from token {BANDS[place - 1]} of responses on" if place > 1 else "")

    def after(self, grown: Floats, tokens: int) -> Capital:
        """Behind a phase whose tokens made cells grow by these logs, of ``growth``, added up over all ranks.

        A falling share of each capital is then spread evenly, so that a fault that begins late finds cells that have not lost all
        (fixed share: Herbster and Warmuth, Machine Learning 1998). The mean stays what it was.
        """
        logs, share = self.logs + grown, 1.0 / (_SETTLED + self.phases)
        spread = [np.logaddexp(part + math.log1p(-share), _log_mean(part) + math.log(share)) for part in logs]
        return replace(self, logs=np.stack(spread), tokens=self.tokens + tokens, phases=self.phases + 1)


def _log_mean(logs: Floats) -> float:
    top = float(logs.max())
    return top + float(np.log(np.exp(logs - top).mean()))


def bets(statistics: Floats, weights: Floats, allowed: float | None) -> Floats:
    """Logs by which cells grow with each of some tokens, [n, designs, S, bets].

    Args:
        statistics: [n, S] of ``statistics_of``.
        weights: [n] p(y) / p'(y).
        allowed: mean of a statistic that rounding may bring about, either way; None: nothing is bet on them unweighed.
    """
    found = np.zeros((len(weights), DESIGNS, *BETS.shape))
    weights = np.minimum(weights, _HEAVIEST)
    found[:, WEIGHED] = np.log(np.maximum(1.0 + (statistics * weights[:, None])[..., None] * BETS, _LEAST))
    if allowed is not None:
        found[:, PLAIN] = np.log(np.maximum(1.0 + statistics[..., None] * BETS, _LEAST)) - np.abs(BETS) * allowed
    return found


def growth(each: Floats, places: NDArray[np.int64]) -> Floats:
    """Logs by which cells grow with all of some tokens, of ``SHAPE``.

    Args:
        each: [n, designs, S, bets] of ``bets``.
        places: [n] number of each token in its response, from 0.
    """
    band = np.searchsorted(BANDS, places, side="right")  # 1: the first one
    sums = [each.sum(0), *(each[band == place].sum(0) for place in range(1, 1 + len(BANDS)))]
    return np.stack(sums, axis=1)
