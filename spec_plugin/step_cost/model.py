"""What a decoding step takes, by batch size and k: running medians of the engine's own steps (law 7).

A step of b requests with k drafted tokens takes as long as a plain one, and something more: the target computes b * k tokens
beside b, and the draft makes its passes. What a plain step takes follows the contexts, which grow with the responses; what is
more does not, since attention reads the KV cache once whatever k is. So the two are kept apart. Both are medians of the latest
phases, by bands of batch sizes (``bands``), and straight lines between those that were timed, in the batch size and in k. Beyond
the largest batch with drafts, as many drafted tokens take as long as they would there. What a phase is slower by as a whole is
taken out first (``at_usual_speed``); what plain steps and drafted ones of different phases are still off against each other is
told by pairs (``policy.break_even.correction``).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spec_plugin.api.events import StepTiming
from spec_plugin.step_cost.bands import Seen, band_of, mean, middle, together

Numbers = NDArray[np.float64]

#: phases whose measurements of a kind are kept, the latest
_MEMORY_PHASES = 8
#: steps of a phase that say as much as all of it, and those of rollouts that say as much as what is known without them
_STEPS_OF_A_PHASE, _PRIOR_STEPS = 8, 8
#: a drafted step that is measured below this share of a plain one cannot be right
_IMPLAUSIBLE = 0.5
#: factor by which the start-up may be off for all k alike
_OFF_BY = 2.0
#: a rollout whose contexts are longer than what is known by this factor is taken as it is, however fast the machine is
_LONGER = 2.0
#: share of the batch sizes, the smallest, that tell how fast the machine is in rollouts: contexts cost a small batch least
_SMALL = 1 / 4


class StepCost(Protocol):
    """Seconds of decoding steps, whether they were measured (``CostModel``) or are projected (``projection.Roofline``)."""

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """Of one step.

        Args:
            batch: requests in it.
            k: drafted tokens of each.
            paused: with k = 0, is the draft's forward pass left out.
            context: tokens of each in the KV cache; None: as they usually are. Who has measured knows no others.
        """
        ...

    def seconds_of(self, batch: ArrayLike, k: ArrayLike, paused: ArrayLike = True) -> Numbers:
        """The same of many, which are broadcast against each other."""
        b, ks, p = np.broadcast_arrays(batch, k, paused)
        found = [
            self.seconds(*one) for one in zip(b.ravel().tolist(), ks.ravel().tolist(), p.ravel().tolist(), strict=True)
        ]
        return np.array(found, np.float64).reshape(b.shape)


class Corrected(StepCost):
    """A cost model whose drafted steps take ``factor`` times as long, and never less than plain ones."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost, self._factor = cost, factor

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """See ``StepCost``."""
        return float(self.seconds_of(batch, k, paused))

    def seconds_of(self, batch: ArrayLike, k: ArrayLike, paused: ArrayLike = True) -> Numbers:
        """See ``StepCost``."""
        drafted = np.asarray(k) > 0
        found: Numbers = self._cost.seconds_of(batch, k, paused) * np.where(drafted, self._factor, 1.0)
        if self._factor < 1.0:  # else none is below
            found = np.where(drafted, np.maximum(found, self._cost.seconds_of(batch, 0)), found)
        return found


class _Cell(NamedTuple):
    """What was timed of one kind of step."""

    batch: float
    seconds: float
    evidence: float  # steps, of each phase a few: what disturbs a step disturbs those beside it


def _of_phases(seen: Sequence[Seen]) -> _Cell:
    """What several phases measured, the latest ones."""
    found = mean(seen) if len(seen) < 3 else middle(seen)
    return _Cell(found.batch, found.seconds, sum(min(s.steps, _STEPS_OF_A_PHASE) for s in seen))


class _Key(NamedTuple):
    band: int
    k: int
    paused: bool
    calibrated: bool  # was it timed at start-up: contexts are short there


class CostModel(StepCost):
    """Seconds of a decoding step by batch size and k; ``observe`` what the engine measured, then ask."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._seen: dict[_Key, list[Seen]] = {}  # the latest phases, oldest first
        self._cells: dict[_Key, _Cell] = {}  # what these say
        self._context = 0.0  # tokens, of those steps that plain ones were last taken from as they were
        self._table: _Table | None = None
        #: why the model must not be believed yet; None when it may be
        self.problem: str | None = "no plain step was timed"

    def observe(self, timings: Sequence[StepTiming], calibration: bool = False) -> None:
        """Learn from steps of the engine; what makes no sense (not finite, not positive) is left out.

        Args:
            timings: the engine's step log.
            calibration: of the start-up, all kinds in turn, at short contexts.
        """
        known = [t for t in timings if _makes_sense(t)]
        if not known:
            return
        self._context = max(self._context, *(t.context for t in known if calibration), 0.0)
        for t in together(known):
            paused = not t.k and t.paused
            if not calibration and not t.k and not paused and self.knows_reading:  # of a pair: the draft read the text
                t, paused = replace(t, seconds=t.seconds * float(self.paused_share(t.batch))), True
            key = _Key(band_of(t.batch), t.k, paused, calibration)
            seen = self._seen.setdefault(key, [])
            seen.append(Seen(t.seconds, t.batch, t.context, t.steps))
            del seen[:-_MEMORY_PHASES]
            self._cells[key] = _of_phases(seen)
        self._table, self.problem = _table_of(self._cells)

    def at_usual_speed(self, timings: Sequence[StepTiming]) -> tuple[StepTiming, ...]:
        """Steps of one rollout as they would have been, had the machine been as fast as it usually is.

        A shared machine is faster or slower from one rollout to the next, and plain steps and drafted ones come from different
        rollouts. So only what a rollout says of some kinds of steps *against others* is news, unless its contexts are much longer
        than any before.
        """
        known = [t for t in timings if _makes_sense(t)]
        if not known or self.problem is not None:
            return tuple(timings)
        longest = max(t.context for t in known)
        if longest > _LONGER * self._context:
            self._context = longest
            return tuple(timings)
        usually = self.seconds_of([t.batch for t in known], [t.k for t in known], [t.paused for t in known])
        slow = np.array([t.seconds for t in known]) / usually
        order = np.argsort(slow)
        passed = np.cumsum(np.array([t.seconds * t.steps for t in known])[order])
        usual = float(slow[order][np.searchsorted(passed, passed[-1] / 2)])
        return tuple(replace(t, seconds=t.seconds / usual) for t in timings)

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """See ``StepCost``.

        Raises:
            RuntimeError: if nothing was observed.
        """
        return float(self.seconds_of(batch, k, paused))

    def seconds_of(self, batch: ArrayLike, k: ArrayLike, paused: ArrayLike = True) -> Numbers:
        """The same of many, which are broadcast against each other."""
        if self._table is None:
            raise RuntimeError("the cost model has seen no step yet")
        return self._table.seconds(np.asarray(batch, np.float64), np.asarray(k, np.float64), np.asarray(paused))

    def break_even(self, batch: float, k: int) -> float:
        """Acceptance length at which k drafted tokens give as many tokens per second as none, with the draft paused."""
        return self.seconds(batch, k) / self.seconds(batch, 0)

    def paused_share(self, batch: ArrayLike) -> Numbers:
        """What plain steps of these sizes take with the draft paused, of those in which it reads."""
        return self.seconds_of(batch, 0) / self.seconds_of(batch, 0, False)

    @property
    def knows_reading(self) -> bool:
        """Has the start-up timed plain steps both with the draft paused and with one that reads."""
        return self._table is not None and self._table.reading is not None


def positive(seconds: float) -> bool:
    """Are so many seconds a time that something may take."""
    return math.isfinite(seconds) and seconds > 0.0


def _makes_sense(t: StepTiming) -> bool:
    return t.alike and t.batch >= 1 and t.k >= 0 and t.steps >= 1 and positive(t.seconds)


def _table_of(cells: Mapping[_Key, _Cell]) -> tuple[_Table | None, str | None]:
    """What can be made of the cells, and why it is not to be believed; None: it is.

    Batch sizes at which the timings contradict themselves are left out, as long as others remain: something else had the machine.
    """
    wrong: dict[tuple[int, bool], str] = {}
    for key, cell in cells.items():
        plain = cells.get(_Key(key.band, 0, True, key.calibrated))
        if key.k and plain is not None and not cell.seconds / plain.seconds > _IMPLAUSIBLE:
            share = f"{cell.seconds / plain.seconds:.3g} of the time of a plain one"
            wrong[key.band, key.calibrated] = f"a step with k={key.k} at batch size {key.band} seems to take {share}"
    sane = {key: cell for key, cell in cells.items() if (key.band, key.calibrated) not in wrong}
    contradict = f"{next(iter(wrong.values()))}: the timings contradict each other" if wrong else ""
    parts = [{key: cell for key, cell in sane.items() if key.calibrated is told} for told in (True, False)]
    started, rolled = (part if any(not key.k and key.paused for key in part) else {} for part in parts)
    if not started and not rolled:
        return None, contradict or "no plain step was timed"
    table = _started(started or rolled)
    if started and rolled:
        table = _rolled(rolled, table)
    return table, None if table.more.any() else contradict or "no speculating step was timed"


@dataclass(frozen=True)
class _Table:
    """Straight lines between what was timed."""

    plain: _Line  # seconds of a plain step by batch size, the draft paused
    reading: _Line | None  # what the draft's pass adds to these where it only reads
    batches: Numbers  # [n], rising
    more: Numbers  # [n, width + 1] seconds that k drafted tokens add

    def beyond(self, batch: ArrayLike, k: ArrayLike) -> Numbers:
        """What drafted tokens add to a plain step, seconds."""
        batch, k = np.asarray(batch, np.float64), np.asarray(k, np.float64)
        width = self.more.shape[1] - 1
        k = k * np.maximum(1.0, batch / self.batches[-1])  # as many tokens at the largest batch
        place, inside = np.interp(batch, self.batches, np.arange(len(self.batches))), np.minimum(k, width)
        left, low = np.floor(place).astype(int), np.floor(inside).astype(int)
        right, high = np.minimum(left + 1, len(self.batches) - 1), np.minimum(low + 1, width)
        share, part = place - left, inside - low
        at_left, at_right = (self.more[row, low] * (1.0 - part) + self.more[row, high] * part for row in (left, right))
        found: Numbers = (at_left * (1.0 - share) + at_right * share) * np.maximum(1.0, k / width)
        return found

    def read(self, batch: ArrayLike) -> Numbers:
        """What the draft's pass adds where it only reads, seconds; where that was not timed, the least that a draft adds."""
        return np.full(np.shape(batch), self.more[:, 1].min()) if self.reading is None else self.reading.at(batch)

    def seconds(self, batch: Numbers, k: Numbers, paused: NDArray[np.bool_]) -> Numbers:
        """Of one step of each kind."""
        batch, k, paused = np.broadcast_arrays(batch, k, paused)
        more = np.where(k > 0, self.beyond(batch, k), np.where(paused, 0.0, self.read(batch)))
        found: Numbers = self.plain.at(batch) + more
        return found


def _started(cells: Mapping[_Key, _Cell]) -> _Table:
    """From the start-up alone, or from rollouts alone."""
    plain = {key.band: cell for key, cell in cells.items() if not key.k and key.paused}
    reading, columns = {}, defaultdict[int, dict[int, float]](dict)
    for key, cell in cells.items():
        more = max(0.0, cell.seconds - plain[key.band].seconds) if key.band in plain else None
        if more is not None and key.k:
            columns[key.band][key.k] = more
        elif more is not None and not key.paused:
            reading[plain[key.band].batch] = more
    width = max((max(more) for more in columns.values()), default=1)
    bands = sorted(columns)
    return _Table(
        _Line({cell.batch: cell.seconds for cell in plain.values()}),
        _Line(reading) if reading else None,
        np.array([plain[band].batch for band in bands] or [1.0]),
        np.array([_all_k(columns[band], width) for band in bands] or [np.zeros(width + 1)]),
    )


def _rolled(cells: Mapping[_Key, _Cell], start: _Table) -> _Table:
    """From rollouts, and of what they have not shown, or in few phases, from the start-up."""
    plain = {key.band: cell for key, cell in cells.items() if not key.k and key.paused}
    smallest = sorted(plain.values(), key=lambda cell: cell.batch)[: math.ceil(_SMALL * len(plain))]
    speed = statistics.median(cell.seconds / float(start.plain.at(cell.batch)) for cell in smallest)
    points = {x: speed * y for x, y in start.plain.points.items() if x < smallest[0].batch}
    for cell in plain.values():
        known = speed * float(start.plain.at(cell.batch)) if cell.batch <= start.plain.last else cell.seconds
        points[cell.batch] = _blend(cell.seconds, known, cell.evidence)
    width = max(start.more.shape[1] - 1, *(key.k for key in cells))
    batches, ks = np.array(sorted({*points, *start.batches})), np.arange(width + 1)
    line, reading = _Line(points), None if start.reading is None else start.reading.times(speed)
    more = speed * start.beyond(batches[:, None], ks)
    # of 1024 requests the start-up knows nothing: what as many tokens take without drafts bounds it
    if reading is not None:
        tokens, plain_line = batches[:, None] * (ks + 1), line.never_falling()
        as_tokens = plain_line.at(tokens) - plain_line.at(batches)[:, None] + ks * reading.at(batches)[:, None]
        more = np.where(tokens <= line.last, np.minimum(more, as_tokens), more)
    timed = [(key, cell, plain[key.band]) for key, cell in cells.items() if key.k and key.band in plain]
    rows = np.searchsorted(batches, [beside.batch for _, _, beside in timed])
    found = [max(0.0, cell.seconds - beside.seconds) for _, cell, beside in timed]
    evidence = [min(cell.evidence, beside.evidence) for _, cell, beside in timed]
    before = [more[row, key.k] for (key, *_), row in zip(timed, rows, strict=True)]
    if (known := float(np.dot(before, evidence))) > 0.0:
        # what the start-up was off by it was off by for each k, those that no rollout has drafted among them; by sums, since of
        # small batches drafts add next to nothing, and noise is many times that
        off_by = np.clip(float(np.dot(found, evidence)) / known, 1.0 / _OFF_BY, _OFF_BY)
        more *= _blend(float(off_by), 1.0, sum(evidence))
    for (key, *_), row, measured, steps in zip(timed, rows, found, evidence, strict=True):
        more[row, key.k] = _blend(measured, more[row, key.k], steps)
    return _Table(line, reading, batches, more)


def _blend(measured: float, known: float, steps: float) -> float:
    return (measured * steps + known * _PRIOR_STEPS) / (steps + _PRIOR_STEPS)


class _Line:
    """Straight lines through points; constant below the first, and on with the slope of the larger half beyond the last."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self.points = points
        self._x = np.array(sorted(points), np.float64)
        self._y = np.array([points[x] for x in sorted(points)], np.float64)
        self.last = float(self._x[-1])
        half = max(self.last / 2, float(self._x[0]))
        rise = float(self._y[-1] - np.interp(half, self._x, self._y))
        self._slope = max(0.0, rise / (self.last - half)) if self.last > half else 0.0

    def at(self, x: ArrayLike) -> Numbers:
        x = np.asarray(x, np.float64)
        found: Numbers = np.interp(x, self._x, self._y) + np.maximum(0.0, x - self.last) * self._slope
        return found

    def times(self, factor: float) -> _Line:
        return _Line({x: factor * y for x, y in self.points.items()})

    def never_falling(self) -> _Line:
        return _Line(dict(zip(self._x.tolist(), np.minimum.accumulate(self._y[::-1])[::-1].tolist(), strict=True)))


def _all_k(more: Mapping[int, float], width: int) -> Numbers:
    """Seconds of k = 0 .. width from those of some k: straight lines, through nothing at 0, never falling."""
    ks = np.array([0, *sorted(more)])
    seconds = np.maximum.accumulate([0.0, *(more[k] for k in sorted(more))])
    wanted = np.arange(width + 1)
    found: Numbers = np.interp(wanted, ks, seconds) * np.maximum(1.0, wanted / ks[-1])
    return found
