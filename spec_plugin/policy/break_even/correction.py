"""Pairs put the cost model right: how much longer drafted steps take beside plain ones than it says (law 7).

The cost model knows plain steps and drafted ones of different phases, of a machine that is faster or slower from one to the next.
A pair (``StepPair``) has them side by side, in the same second; where answers are too short for one, or the engine cannot change
k while requests run, two rollouts in a row take its place. The median of the pairs, as far as it is more than chance, is by what
factor drafted steps take longer; so it is the pairs that decide between drafts and none, and the model between one k and another.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np

from spec_plugin.api.events import RolloutStats
from spec_plugin.step_cost.bands import band_of
from spec_plugin.step_cost.model import CostModel, positive

#: pairs that are remembered, and those that can show that drafted steps take less: a burst may have spoilt one or two
_KEPT, _FEW = 32, 3
#: rollouts with drafts and never a pair of steps, after which they are too short for these, and are compared themselves
_SHORT = 8
#: share of the decoding that plain steps may cost, and the largest share of the steps that they may be
_MAY_COST, _MOST_SHARE = 0.02, 0.25
#: pairs after which half as many are looked at
_HALVED_BY = 24


class Correction:
    """What the pairs of a run say of its cost model."""

    def __init__(self, cost: CostModel, whole_rollouts: bool = False) -> None:
        """No pair was seen yet.

        Args:
            whole_rollouts: can the engine not change k while requests run, so that two rollouts in a row must be compared.
            cost: what is put right. It says what a plain step takes with the draft paused, of one in which the draft reads; where
                the start-up has not timed both, nothing is made of pairs.
        """
        self._cost = cost
        #: batch, k, log of a plain step's seconds with the draft paused over a drafted step's
        self._pairs: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)
        self._whole_rollouts = whole_rollouts
        self._paired = False  # was there ever a pair of steps
        self._drafted = 0  # rollouts in which there might have been one
        self._before: RolloutStats | None = None  # the last rollout's

    def add(self, stats: RolloutStats) -> None:
        """A rollout is over: take its pairs, but for those that make no sense."""
        before, self._before = self._before, stats
        self._paired = self._paired or bool(stats.pairs)
        self._drafted += stats.drafts > 0 and self._cost.knows_reading  # else no pair is asked for
        if self.by_rollouts and before is not None and (before.drafts > 0) != (stats.drafts > 0):
            self._add_rollouts(*((before, stats) if stats.drafts else (stats, before)))
        good = [p for p in stats.pairs if p.k > 0 and positive(p.drafted_seconds) and positive(p.plain_seconds)]
        if good and self._cost.knows_reading:
            good = good[-_KEPT:]  # of 16 engines there may be hundreds
            paused = self._cost.paused_share([pair.batch for pair in good]).tolist()
            for pair, share in zip(good, paused, strict=True):
                ratio = pair.plain_seconds * share / pair.drafted_seconds
                self._pairs.append((pair.batch, pair.k, math.log(ratio)))

    @property
    def by_rollouts(self) -> bool:
        """Are two rollouts in a row compared: k cannot change while requests run, or they are too short for pairs of steps."""
        return self._whole_rollouts or (not self._paired and self._drafted >= _SHORT)

    def _add_rollouts(self, plain: RolloutStats, drafted: RolloutStats) -> None:
        """Two in a row: steps of like batches make one pair."""
        found = {band_of(s.batch): s for s in plain.alike if s.k == 0 and s.paused and positive(s.seconds)}
        both = [(s, found[band_of(s.batch)]) for s in drafted.alike if s.k > 0 and band_of(s.batch) in found]
        both = [(d, p) for d, p in both if positive(d.seconds)]
        if not both:
            return
        weights = [float(min(d.steps, p.steps)) for d, p in both]
        ratio = sum(w * math.log(p.seconds / d.seconds) for w, (d, p) in zip(weights, both, strict=True)) / sum(weights)
        most, _ = max(both, key=lambda pair: pair[0].steps)
        self._pairs.append((most.batch, most.k, ratio))

    @property
    def factor(self) -> float:
        """By what drafted steps take longer than the cost model says, beside its plain ones; 1 where that may be chance.

        Of one pair nobody can say so: that it takes longer is believed, less is not before there are ``_FEW``.
        """
        if not self._pairs:
            return 1.0
        batch, k, ratio = np.array(self._pairs, np.float64).T
        off = np.log(self._cost.seconds_of(batch, 0) / self._cost.seconds_of(batch, k)) - ratio
        middle = statistics.median(off.tolist())
        noise = 1.4826 * statistics.median(abs(off - middle).tolist())
        sure = math.copysign(max(0.0, abs(middle) - 1.25 * noise / math.sqrt(len(off))), middle)
        return math.exp(sure if len(off) >= _FEW else max(0.0, sure))

    def plain_share(self, speedup: float) -> float:
        """Share of the steps to decode plainly where drafts make decoding so much faster: many where little is lost by it."""
        if not self._cost.knows_reading:
            return 0.0
        return _MAY_COST / _lost(speedup) / (1.0 + len(self._pairs) / _HALVED_BY)

    def plain_every(self, speedup: float) -> int:
        """The same where rollouts are compared: one in so many is plain."""
        return math.ceil(_lost(speedup) / _MAY_COST)


def _lost(speedup: float) -> float:
    """What a plain step loses of its time, and no less than allows for the largest share of them."""
    return max(1.0 - 1.0 / max(speedup, 1.0), _MAY_COST / _MOST_SHARE)
