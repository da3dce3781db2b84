"""Where a series changes its level: medians before and after each place, against its own noise. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from spec_plugin.commands.report.run import Series

_BEFORE, _AFTER = 5, 3  # values that make a level
_NOISES = 4.0  # a shift is larger than so many times what a value usually differs from the next one by
#: so many values say what levels usually change by, which a shift must exceed by as much: a run that wanders has no news
_MANY = 30


@dataclass(frozen=True)
class Shift:
    """A change of level."""

    step: int  # the first one at the new level
    before: float
    after: float

    @property
    def fell(self) -> bool:
        """Is the new level lower."""
        return self.after < self.before


def shifts_of(series: Series, least: float, floor: float = 0.0) -> list[Shift]:
    """Places where the level changes, one for each change.

    Args:
        series: the numbers.
        least: smallest change that counts, as a share of the level before, above ``floor``.
        floor: the value that is no gain; changes are relative to the distance from it.
    """
    values, found = series.values, []
    places = range(2, len(values) - 1)
    levels = [(median(values[max(0, i - _BEFORE) : i]), median(values[i : i + _AFTER])) for i in places]
    usual = median(abs(after - before) for before, after in levels) if len(values) >= _MANY else 0.0
    least_change = _NOISES * max(_noise(values), usual)
    for i, (before, after) in zip(places, levels, strict=True):
        change = abs(after - before)
        if change >= least * max(abs(before - floor), 1e-12) and change > least_change:
            found.append((i, Shift(series.steps[i], before, after)))
    return _one_each(found, values)


def _noise(values: Sequence[float]) -> float:
    """How far a value usually is from the next one; a single jump hardly moves it."""
    rises = [abs(b - a) for a, b in pairwise(values)]
    return median(rises) if rises else 0.0


def _one_each(found: Sequence[tuple[int, Shift]], values: Sequence[float]) -> list[Shift]:
    """Of neighbouring places in one direction, the one where the value itself jumps most."""
    groups: list[list[tuple[int, Shift]]] = []
    for i, shift in found:
        if groups and i - groups[-1][-1][0] <= 2 and shift.fell == groups[-1][-1][1].fell:
            groups[-1].append((i, shift))
        else:
            groups.append([(i, shift)])
    return [max(group, key=lambda place: _jump(place, values))[1] for group in groups]


def _jump(place: tuple[int, Shift], values: Sequence[float]) -> float:
    i, shift = place
    rise = values[i] - values[i - 1]
    return -rise if shift.fell else rise
