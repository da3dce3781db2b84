"""The judge of law 7: do drafts give more tokens a second than plain steps of the same engine in the same second (pairs).

Each pair (``StepPair``) says how much longer a drafted step took than a plain one beside it; with the tokens that a drafted step
made, that is a speed-up. Two things are done with it:

``bias``      how far the cost model, which adds up what was timed at different times, is off; as far as that is significant.
``slower``    evidence that drafting does not pay, whatever the cost model says: a sequential test by betting (Waudby-Smith and
              Ramdas, J. R. Stat. Soc. B 86, 2024, section 4), started anew whenever it has lost (an e-detector: Shin, Ramdas and
              Rinaldo, arXiv 2203.03532, section 2). Where drafting is as fast as plain decoding, or faster, a false verdict comes
              once in ``PAIRS_TO_A_FALSE_ALARM`` pairs or more on average, whatever the noise, if that is as likely to favour the
              one side of a pair as the other.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from spec_plugin.builtin.break_even.plan import MARGIN
from spec_plugin.events import RolloutStats, StepTiming
from spec_plugin.step_cost.bands import band_of
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.fit import Kinds, Numbers
from spec_plugin.step_cost.model import StepCost, positive

PAIRS_TO_A_FALSE_ALARM = 100
#: a single pair says no more than this, log scale: what interrupts one stretch is nobody's fault
_MOST = 0.4
#: stakes, of which each has a third: large ones notice large losses soon, small ones notice small losses at all
_STAKES = (0.4, 1.0, 2.2)
#: pairs that are remembered, and rollouts after which one is forgotten
_KEPT, _PHASES = 32, 64
#: noise of a single pair, log scale, as long as there are too few to tell
_NOISE, _NOISE_PAIRS = 0.15, 4
#: steps of the calibration that count
_CALIBRATED = 8
#: pairs that say more than the cost model, and below which one that a burst has spoilt is their median
_ENOUGH, _FEW = 6, 3
#: share of the decoding that plain steps may cost, and the shares of steps between which that is kept
_MAY_COST = 0.02
_LEAST_SHARE, _MOST_SHARE = 0.002, 0.25
#: pairs after which half as many are looked at
_HALVED_BY = 24


Doubt = Callable[[float, float], float]


class Judge:
    """What the pairs of a run say."""

    def __init__(self, calibration: Sequence[StepTiming] = ()) -> None:
        """Nothing was heard yet.

        Args:
            calibration: steps of the start-up, all kinds in turn: they tell what a plain step takes with the draft paused, of one
                in which the draft reads. Where it has not both, nothing is made of pairs.
        """
        found: dict[tuple[float, bool], list[StepTiming]] = {}
        for t in calibration:
            if t.k == 0 and positive(t.seconds) and t.steps >= _CALIBRATED:
                found.setdefault((t.batch, t.paused), []).append(t)
        both = sorted(batch for batch, paused in found if paused and (batch, False) in found)
        self._sizes = [math.log(batch) for batch in both]
        self._paused = [min(1.0, _mean(found[batch, True]) / _mean(found[batch, False])) for batch in both]
        #: rollout, batch, k, context, log of a plain step's seconds with the draft paused over a drafted step's
        self._pairs: deque[tuple[int, int, int, float, float]] = deque(maxlen=_KEPT)
        self._phase = 0
        self._reading = 0.0  # share of the last drafting rollout's time in which the draft only read
        self._capital: list[float] = []  # of each stake
        self.acquit()

    def hear(self, stats: RolloutStats, tokens: Callable[[int], float], anew: bool) -> None:
        """A rollout is over.

        Args:
            stats: what the engines say of it; pairs that make no sense are left out.
            tokens: of a drafted step of one request, by k.
            anew: where there are pairs, forget those before: they may be of another draft, or another machine.
        """
        self._phase += 1
        while self._pairs and self._pairs[0][0] < self._phase - _PHASES:
            self._pairs.popleft()
        good = [p for p in stats.pairs if p.k > 0 and positive(p.drafted_seconds) and positive(p.plain_seconds)]
        if self.deaf:
            return
        if anew:
            self.acquit()
            if good:
                self._pairs.clear()
        if stats.drafts:
            # of a step that reads prompts some drafts may be those of the batch before it
            mixed = [m for m in stats.mixed if m.drafted and not m.prompts]
            drafted = sum(s.seconds * s.steps for s in stats.steps if s.k > 0) + sum(m.seconds for m in mixed)
            # there the plain steps are those of pairs
            sizes = {band_of(s.batch) for s in stats.steps if s.k > 0} | {band_of(m.batch) for m in mixed}
            others = (s for s in stats.steps if s.k == 0 and not s.paused and band_of(s.batch) not in sizes)
            reading = sum(s.seconds * s.steps for s in others)
            self._reading = reading / (drafted + reading) if drafted + reading > 0.0 else 0.0
        for pair in good:
            paused = float(np.interp(math.log(pair.batch), self._sizes, self._paused))
            ratio = math.log(pair.plain_seconds * paused / pair.drafted_seconds)
            self._take(pair.batch, pair.k, pair.context, ratio, tokens)

    def hear_both(self, plain: RolloutStats, drafted: RolloutStats, tokens: Callable[[int], float]) -> None:
        """Two rollouts in a row, of an engine that cannot change k while requests run: steps of like batches make one pair."""
        found = {band_of(s.batch): s for s in plain.steps if s.k == 0 and s.paused and positive(s.seconds)}
        timed = [s for s in drafted.steps if s.k > 0 and positive(s.seconds)]
        both = [(s, found[band_of(s.batch)]) for s in timed if band_of(s.batch) in found]
        if not both:
            return
        weights = [float(min(d.steps, p.steps)) for d, p in both]
        ratio = sum(w * math.log(p.seconds / d.seconds) for w, (d, p) in zip(weights, both, strict=True)) / sum(weights)
        most, _ = max(both, key=lambda pair: pair[0].steps)
        self._take(round(most.batch), most.k, most.context, ratio, tokens)

    def _take(self, batch: int, k: int, context: float, ratio: float, tokens: Callable[[int], float]) -> None:
        self._pairs.append((self._phase, batch, k, context, ratio))
        gain = max(-_MOST, min(_MOST, self._of_all(ratio + math.log(tokens(k)))))
        self._capital = [max(1.0, c) * (1.0 - s * gain) for c, s in zip(self._capital, _STAKES, strict=True)]

    @property
    def deaf(self) -> bool:
        """Is nothing made of pairs, for want of a calibration."""
        return not self._sizes

    @property
    def slower(self) -> bool:
        """Have the pairs shown that drafting gives fewer tokens a second than plain decoding."""
        return statistics.fmean(self._capital) >= PAIRS_TO_A_FALSE_ALARM

    def acquit(self) -> None:
        """No evidence, or the verdict was heard: the next one needs evidence of its own."""
        self._capital = [1.0] * len(_STAKES)

    def bias(self, cost: StepCost, doubt: Doubt | None = None) -> float:
        """By what factor drafted steps take longer beside plain ones than the cost model says; 1 where that may be chance.

        A burst may have spoilt a few pairs: of these the larger of 1 and what they say, or the smaller, as ``doubt`` has it.
        """
        if not self._pairs:
            return 1.0
        _, batch, k, context, ratio = self._columns
        off = np.log(
            cost.seconds_of(Kinds.of(batch, 0, True, context)) / cost.seconds_of(Kinds.of(batch, k, False, context))
        )
        off = (off - ratio).tolist()
        middle, noise = _middle_and_noise(off)
        sure = max(0.0, abs(middle) - noise)
        found = math.exp(math.copysign(sure, middle))
        return doubt(1.0, found) if doubt is not None and len(off) < _FEW else found

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
        _, batch, k, context, ratio = self._columns
        wanted = np.asarray(table)[np.minimum(batch, len(table) - 1).astype(int)]
        then, now = (cost.seconds_of(Kinds.of(batch, n, False, context)) for n in (k, wanted))
        made = np.array([tokens_per_step(acceptance, n) for n in wanted.tolist()])
        found = (ratio + np.log(then / now * made))[wanted > 0].tolist()
        if len(found) < _ENOUGH:
            return None
        middle, noise = _middle_and_noise(found)
        return self._of_all(middle + noise) > 0.0 if serving else self._of_all(middle) > math.log(MARGIN)

    def speedup(self, acceptance: Sequence[float], table: Sequence[int] = ()) -> float | None:
        """Tokens a second of drafted steps over those of plain ones: median of the pairs, for this acceptance; None: no pair.

        Of those that drafted as the table does, where there are a few: a pair of k=3 says little of k=8.
        """
        gains = [(batch, k, ratio + math.log(tokens_per_step(acceptance, k))) for _, batch, k, _, ratio in self._pairs]
        alike = [gain for batch, k, gain in gains if table and k == table[min(batch, len(table) - 1)]]
        found = alike if len(alike) >= _FEW else [gain for *_, gain in gains]
        return math.exp(self._of_all(statistics.median(found))) if found else None

    @property
    def _columns(self) -> tuple[Numbers, ...]:
        """Of the pairs: rollouts, batches, k, contexts (NaN: not known) and ratios, [n] each."""
        phase, batch, k, context, ratio = np.array(self._pairs, np.float64).T
        return phase, batch, k, np.where(context > 0.0, context, math.nan), ratio

    def _of_all(self, gain: float) -> float:
        """The gain of all steps, log scale, from that of the drafted ones: in the others the draft reads, and gains nothing."""
        if not self._paused:
            return gain
        return math.log((1.0 - self._reading) * math.exp(gain) + self._reading * statistics.fmean(self._paused))

    def plain_share(self, speedup: float) -> float:
        """Share of the steps to decode plainly where drafts make decoding so much faster: many where little is lost by it."""
        if self.deaf:
            return 0.0
        looked = 1.0 + len(self._pairs) / _HALVED_BY
        return max(_LEAST_SHARE, _MAY_COST / _lost(speedup) / looked)

    def plain_every(self, speedup: float) -> int:
        """The same for an engine that cannot change k while requests run: one rollout in so many is plain."""
        return math.ceil(_lost(speedup) / _MAY_COST)


def _lost(speedup: float) -> float:
    """What a plain step loses of its time, and no less than allows for the largest share of them."""
    return max(1.0 - 1.0 / max(speedup, 1.0), _MAY_COST / _MOST_SHARE)


def _middle_and_noise(found: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error."""
    middle = statistics.median(found)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in found)
    noise = (spread * len(found) + _NOISE * _NOISE_PAIRS) / (len(found) + _NOISE_PAIRS)
    return middle, 1.25 * noise / math.sqrt(len(found))


def _mean(timings: Sequence[StepTiming]) -> float:
    return sum(t.seconds * t.steps for t in timings) / sum(t.steps for t in timings)
