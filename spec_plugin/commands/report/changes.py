"""Where a series changes its level against its own noise, and what else changed shortly before. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from spec_plugin.commands.report.run import LoggedRun, Series

_BEFORE, _AFTER = 5, 3  # values that make a level
_NOISES = 4.0  # a shift is larger than so many times what a value usually differs from the next one by
#: so many values say what levels usually change by, which a shift must exceed by as much: a run that wanders has no news
_MANY = 30
_LOOK_BACK = 5  # steps before a fall in which another change is told beside it
_NUMBERS = ("no", "one", "two", "three", "four", "five")
_LEVELS = {"entropy": "the policy's entropy", "response_tokens": "the length of responses"}
_LEVELS |= {"grad_norm": "the policy's gradient norm", "spec/policy_lag": "the policy's lag"}


class Shift(NamedTuple):
    """A step at which a series changes its level, with the medians before and after."""

    step: int  # the first one at the new level
    before: float
    after: float

    @property
    def fell(self) -> bool:
        """True if the level after the step is lower."""
        return self.after < self.before


def shifts_of(series: Series, least: float, floor: float = 0.0) -> list[Shift]:
    """Places where the level changes; of neighbouring ones in one direction that where the value itself jumps most.

    Args:
        series: the numbers.
        least: smallest change that counts, as a share of the level before, above ``floor``.
        floor: the value that is no gain; changes are relative to the distance from it.
    """
    values, groups = series.values, list[list[tuple[int, Shift]]]()
    levels = [
        (i, Shift(series.steps[i], median(values[max(0, i - _BEFORE) : i]), median(values[i : i + _AFTER])))
        for i in range(2, len(values) - 1)
    ]
    usual = median(abs(s.after - s.before) for _, s in levels) if len(values) >= _MANY else 0.0
    noise = median(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else 0.0  # a single jump hardly moves it
    for i, shift in levels:
        change = abs(shift.after - shift.before)
        if change >= least * max(abs(shift.before - floor), 1e-12) and change > _NOISES * max(noise, usual):
            if groups and i - groups[-1][-1][0] <= 2 and groups[-1][-1][1].fell == shift.fell:
                groups[-1].append((i, shift))
            else:
                groups.append([(i, shift)])
    jumps = [{shift: (values[i] - values[i - 1]) * (-1 if shift.fell else 1) for i, shift in group} for group in groups]
    return [max(group, key=lambda shift: group[shift]) for group in jumps]


def nearby(run: LoggedRun, step: int, most: int = 2) -> str:
    """The last changes before a step, or in it: ``two steps after the learning rate rose from 1e-06 to 1e-05``; else empty."""
    recent = sorted((c for c in _changes(run) if step - _LOOK_BACK <= c[0] <= step), key=lambda c: -c[0])[:most]
    when = ["at the same step as", *(f"{word} step{'s' * (word != 'one')} after" for word in _NUMBERS[1:])]
    return " and ".join(f"{when[step - at]} {words}" for at, words in recent)


def _changes(run: LoggedRun) -> Iterator[tuple[int, str]]:
    """What may move a draft's acceptance: times that a person can check, not proofs."""
    yield from _jumps(run.series("lr"), "the learning rate", ".0e", 1.3)
    for size, series in run.family("spec/k_b").items():
        yield from (c for c in _jumps(series, f"k at batch size {size}", ".0f", 1.5) if "fell" in c[1])
    for step, _ in increments(run.series("spec/refresh_refused")):
        yield step, "a refresh of the draft was refused"
    for name, words in _LEVELS.items():
        for step, before, after in shifts_of(run.series(name), least=0.25):
            yield step, f"{words} {_moved(before, after, '.3g')}"


def _jumps(series: Series, words: str, form: str, factor: float) -> Iterator[tuple[int, str]]:
    for (_, before), (step, after) in pairwise(series.pairs()):
        if before > 0 and (after > factor * before or after * factor < before):
            yield step, f"{words} {_moved(before, after, form)}"


def _moved(before: float, after: float, form: str) -> str:
    return f"{'rose' if after > before else 'fell'} from {before:{form}} to {after:{form}}"


def increments(counter: Series) -> Iterator[tuple[int, float]]:
    """Where a counter rises, and by how much; one that begins above zero has risen before."""
    for (_, last), (step, value) in pairwise([(0, 0.0), *counter.pairs()]):
        if value > last:
            yield step, value - last
