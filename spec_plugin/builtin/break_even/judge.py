"""The judge of law 7: do drafts give more tokens a second than plain steps of the same engine in the same second (pairs).

Each pair (``StepPair``) says how much longer a drafted step took than a plain one beside it; with the tokens that a drafted step
makes, that is a speed-up. Its median, with its standard error, decides between drafts and none (``pays``), and how far the cost
model, which knows plain steps and drafted ones of different phases, is off (``bias``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from spec_plugin.builtin.break_even.plan import MARGIN
from spec_plugin.events import RolloutStats
from spec_plugin.step_cost.bands import band_of
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import CostModel, Numbers, StepCost, positive

#: pairs that are remembered, and rollouts after which one is forgotten
_KEPT, _PHASES = 32, 64
#: noise of a single pair, log scale, as long as there are too few to tell
_NOISE, _NOISE_PAIRS = 0.15, 4
#: pairs that say more than the cost model, and those of the table's own k that say more than all
_ENOUGH, _FEW = 6, 3
#: share of the decoding that plain steps may cost, and the shares of steps between which that is kept
_MAY_COST = 0.02
_LEAST_SHARE, _MOST_SHARE = 0.002, 0.25
#: pairs after which half as many are looked at
_HALVED_BY = 24


class Judge:
    """What the pairs of a run say."""

    def __init__(self, cost: CostModel) -> None:
        """Nothing was heard yet.

        Args:
            cost: says what a plain step takes with the draft paused, of one in which the draft reads. Where the start-up has not
                timed both, nothing is made of pairs.
        """
        self._cost = cost
        #: rollout, batch, k, log of a plain step's seconds with the draft paused over a drafted step's
        self._pairs: deque[tuple[int, int, int, float]] = deque(maxlen=_KEPT)
        self._phase = 0
        self._reading = 0.0  # share of the last drafting rollout's time in which the draft only read

    @property
    def calibrated(self) -> bool:
        """Can anything be made of pairs."""
        return self._cost.knows_reading

    def add_pairs(self, stats: RolloutStats, anew: bool = False) -> None:
        """A rollout is over.

        Args:
            stats: what the engines say of it; pairs that make no sense are left out.
            anew: where there are pairs, forget those before: they may be of another draft, or another machine.
        """
        self._phase += 1
        while self._pairs and self._pairs[0][0] < self._phase - _PHASES:
            self._pairs.popleft()
        if not self.calibrated:
            return
        good = [p for p in stats.pairs if p.k > 0 and positive(p.drafted_seconds) and positive(p.plain_seconds)]
        if anew and good:
            self._pairs.clear()
        if stats.drafts:
            self._reading = _share_reading(stats)
        for pair in good:
            ratio = pair.plain_seconds * self._cost.paused_share(pair.batch) / pair.drafted_seconds
            self._pairs.append((self._phase, pair.batch, pair.k, math.log(ratio)))

    def add_rollouts(self, plain: RolloutStats, drafted: RolloutStats) -> None:
        """Two in a row, of an engine that cannot change k while requests run: steps of like batches make one pair."""
        found = {band_of(s.batch): s for s in plain.alike if s.k == 0 and s.paused and positive(s.seconds)}
        timed = [s for s in drafted.alike if s.k > 0 and positive(s.seconds)]
        both = [(s, found[band_of(s.batch)]) for s in timed if band_of(s.batch) in found]
        if not both:
            return
        weights = [float(min(d.steps, p.steps)) for d, p in both]
        ratio = sum(w * math.log(p.seconds / d.seconds) for w, (d, p) in zip(weights, both, strict=True)) / sum(weights)
        most, _ = max(both, key=lambda pair: pair[0].steps)
        self._pairs.append((self._phase, round(most.batch), most.k, ratio))

    def bias(self, cost: StepCost) -> float:
        """By what factor drafted steps take longer beside plain ones than the cost model says; 1 where that may be chance.

        A burst may have spoilt a few pairs: these can only show that drafted steps take longer.
        """
        if not self._pairs:
            return 1.0
        _, batch, k, ratio = self._columns
        off = np.log(cost.seconds_of(batch, 0) / cost.seconds_of(batch, k)) - ratio
        middle, noise = _middle_and_noise(off.tolist())
        sure = math.copysign(max(0.0, abs(middle) - noise), middle)
        return math.exp(sure if len(off) >= _FEW else max(0.0, sure))

    def pays(self, acceptance: Sequence[float], table: Sequence[int], cost: StepCost, serving: bool) -> bool | None:
        """Do drafts as in this table give more tokens a second than plain decoding; None: too few pairs of its batch sizes.

        Args:
            acceptance: chance of each position.
            table: k by batch size; it may be another than the one under which the pairs were timed.
            cost: says how much longer a step with this table's k takes than one with the pair's.
            serving: are drafts served now: then they are given the benefit of the doubt, else they must clear a margin.
        """
        most = math.log(tokens_per_step(acceptance, max(table)))
        if self._of_all(most) < 0.0:
            return False  # the draft reads so much that nothing would pay, were drafted steps as short as plain ones
        if not self._pairs:
            return None
        _, batch, k, ratio = self._columns
        wanted = np.asarray(table)[np.minimum(batch, len(table) - 1).astype(int)]
        made = np.array([tokens_per_step(acceptance, n) for n in wanted.tolist()])
        gains = ratio + np.log(cost.seconds_of(batch, k) / cost.seconds_of(batch, wanted, False) * made)
        found = gains[wanted > 0].tolist()
        if len(found) < _ENOUGH:
            return None
        middle, noise = _middle_and_noise(found)
        return self._of_all(middle + noise) > 0.0 if serving else self._of_all(middle) > math.log(MARGIN)

    def speedup(self, acceptance: Sequence[float], table: Sequence[int] = ()) -> float | None:
        """Tokens a second of drafted steps over those of plain ones: median of the pairs, for this acceptance; None: no pair.

        Of those that drafted as the table does, where there are a few: a pair of k=3 says little of k=8.
        """
        gains = [(batch, k, ratio + math.log(tokens_per_step(acceptance, k))) for _, batch, k, ratio in self._pairs]
        alike = [gain for batch, k, gain in gains if table and k == table[min(batch, len(table) - 1)]]
        found = alike if len(alike) >= _FEW else [gain for *_, gain in gains]
        return math.exp(self._of_all(statistics.median(found))) if found else None

    @property
    def _columns(self) -> tuple[Numbers, ...]:
        """Of the pairs: rollouts, batches, k and ratios, [n] each."""
        return tuple(np.array(self._pairs, np.float64).T)

    def _of_all(self, gain: float) -> float:
        """The gain of all steps, log scale, from that of the drafted ones: in the others the draft reads, and gains nothing."""
        if not self._reading:
            return gain
        batches = [batch for _, batch, *_ in self._pairs] or [1]
        paused = self._cost.paused_share(statistics.median(batches))
        return math.log((1.0 - self._reading) * math.exp(gain) + self._reading * paused)

    def plain_share(self, speedup: float) -> float:
        """Share of the steps to decode plainly where drafts make decoding so much faster: many where little is lost by it."""
        if not self.calibrated:
            return 0.0
        looked = 1.0 + len(self._pairs) / _HALVED_BY
        return max(_LEAST_SHARE, _MAY_COST / _lost(speedup) / looked)

    def plain_every(self, speedup: float) -> int:
        """The same for an engine that cannot change k while requests run: one rollout in so many is plain."""
        return math.ceil(_lost(speedup) / _MAY_COST)


def _share_reading(stats: RolloutStats) -> float:
    """Share of a rollout's time in which the draft only read; the plain steps of pairs are not counted."""
    # of a step that reads prompts some drafts may be those of the batch before it
    with_drafts = [s for s in stats.steps if s.drafted and not s.prompts]
    sizes = {band_of(s.batch) for s in with_drafts}
    others = [s for s in stats.alike if s.k == 0 and not s.paused and band_of(s.batch) not in sizes]
    drafted, reading = (sum(s.total for s in steps) for steps in (with_drafts, others))
    return reading / (drafted + reading) if drafted + reading > 0.0 else 0.0


def _lost(speedup: float) -> float:
    """What a plain step loses of its time, and no less than allows for the largest share of them."""
    return max(1.0 - 1.0 / max(speedup, 1.0), _MAY_COST / _MOST_SHARE)


def _middle_and_noise(found: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error."""
    middle = statistics.median(found)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in found)
    noise = (spread * len(found) + _NOISE * _NOISE_PAIRS) / (len(found) + _NOISE_PAIRS)
    return middle, 1.25 * noise / math.sqrt(len(found))
