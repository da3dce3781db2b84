"""Which step a line of a console log is of, where the trainer prints no number: by its progress bar and its epochs.

Such a trainer prints the epoch, rounded, and draws a progress bar. To print a line it wipes the bar out and draws it again, with
the line's step. Where the log is a file, the lines wait in a buffer while the bar does not: they come later, several together.
But they keep their order: the n-th line belongs to the n-th bar that was drawn again. A line may be lost, so no line is numbered
by that alone: all of them together tell how many steps an epoch has, and the epochs tell the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

#: of an epoch that is printed with four digits, and of the ratio that was found by such ones
_ROUNDED = 1.2e-3


@dataclass(frozen=True)
class Bar:
    """A progress bar, as it was drawn once."""

    step: int
    steps: int  # of the whole run
    wipes: int = 0  # how often any was wiped out before
    again: bool = False  # wiped out and drawn again, for a line to be printed; ``training_bars`` tells


@dataclass(frozen=True)
class Unnumbered:
    """A step's line that does not say which."""

    metrics: Mapping[str, float]
    epoch: float | None
    bars: int  # that were drawn before it
    printed: int  # lines that were printed through the bar before it, also such as are of no step


def training_bars(bars: Sequence[Bar]) -> list[Bar | None]:
    """The bars of the training itself, and None in the place of all others, such as an evaluation's: the most are its own.

    One is drawn again if one was wiped out since the one before, with the same step; or with another one, which may come late,
    if it was not an evaluation's that was wiped out in the end.
    """
    found: list[Bar | None] = []
    steps = Counter(bar.steps for bar in bars).most_common(1)[0][0] if bars else 0
    before: Bar | None = None
    for at, bar in enumerate(bars):
        if bar.steps != steps:
            found.append(None)
            continue
        wiped = before is not None and bar.wipes > before.wipes
        same = before is not None and (bar.step == before.step or found[at - 1] is not None)
        found.append(replace(bar, again=wiped and same))
        before = bar
    return found


def steps_per_epoch(lines: Sequence[Unnumbered], printed: Sequence[int], bars: Sequence[Bar | None]) -> float | None:
    """Steps in an epoch, as the bars tell; None where they do not.

    Args:
        lines: of steps, in the log's order.
        printed: of each line that was printed through the bar, those of steps among them, the bars that were drawn before it.
        bars: ``training_bars``.
    """
    starts = [at for at, bar in enumerate(bars) if bar and bar.step == 0 and not bar.again] or [0]  # of a process
    ratios: list[float] = []
    for start, end in pairwise([*starts, len(bars)]):
        again = [bar.step for bar in bars[start:end] if bar and bar.again]
        first = bisect_right(printed, start)
        mine = [line for line in lines if start < line.bars <= end and line.printed - first < len(again)]
        ratios += [again[line.printed - first] / line.epoch for line in mine if line.epoch]
    return median(ratios) if ratios else None


def numbered(lines: Sequence[Unnumbered], per_epoch: float | None) -> list[int]:
    """The step of each line.

    Args:
        lines: in the log's order; of a run that was resumed, with epochs that begin again.
        per_epoch: steps in an epoch; None: not known, and the lines are counted.
    """
    epochs = [line.epoch for line in lines]
    known = [epoch for epoch in epochs if epoch is not None]
    if per_epoch is None or len(known) < len(epochs):
        return _counted(epochs)
    ahead = [per_epoch * (after - before) for before, after in pairwise(known) if after > before]
    every = max(1, round(median(ahead) or mean(ahead))) if ahead else 1
    found: list[int] = []
    for at, epoch in enumerate(known):
        exact = per_epoch * epoch
        nearest = every * round(exact / every) if exact > 0.75 * every else max(1, round(exact))
        next_one = every * (found[-1] // every + 1) if found and epoch >= known[at - 1] else nearest
        found.append(next_one if abs(next_one - exact) <= every / 2 + _ROUNDED * exact else nearest)
    return found


def _counted(epochs: Sequence[float | None]) -> list[int]:
    """1, 2, …; where the epoch falls back, the run was resumed behind the lines of smaller epochs."""
    found: list[int] = []
    for at, epoch in enumerate(epochs):
        before = epochs[at - 1] if at else None
        if epoch is not None and before is not None and epoch < before:
            found.append(
                max((n for n, e in zip(found, epochs, strict=False) if e is not None and e < epoch), default=0) + 1
            )
        else:
            found.append(found[-1] + 1 if found else 1)
    return found
