"""Bands of batch sizes: steps of nearly as many requests are counted together, so that a log has a few hundred kinds at most.

The sizes 1 to 16 are bands of their own; above, each octave is cut into eight: 17-18, 19-20, ..., 31-32, 33-36, ..., 961-1024.
What is said of a band goes with the mean batch of the steps that it was seen in, so that no step is taken for a larger one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from spec_plugin.events import MixedSteps, StepTiming

#: sizes up to this one are not put together, and as many bands make two octaves
_EXACT = 16
#: by which a mean of equal sizes may be off, as floats are added
_ROUNDING = 1e-9
#: of what was seen, in the order of the seconds, the share in the middle that is believed, as a median would
_MIDDLE = 0.25


def band_of(batch: float) -> int:
    """The band of a batch size, or of a mean of sizes of one band, named by its largest size."""
    below = math.ceil(batch - _ROUNDING) - 1
    shift = max(0, below.bit_length() - _EXACT.bit_length() + 1)
    return ((below >> shift) + 1) << shift


class Seen(NamedTuple):
    """Steps of one kind that were seen together, in the mean."""

    seconds: float
    batch: float
    context: float
    steps: float


def mean(seen: Iterable[Seen]) -> Seen:
    """Of all of them, by steps."""
    seconds = batch = context = steps = 0.0
    for s in seen:
        seconds, batch, context = (
            seconds + s.seconds * s.steps,
            batch + s.batch * s.steps,
            context + s.context * s.steps,
        )
        steps += s.steps
    return Seen(seconds / steps, batch / steps, context / steps, steps)


def middle(seen: Iterable[Seen]) -> Seen:
    """Of the quarter, by steps, that lies in the middle of the seconds: neither a burst nor a stall says anything.

    Batch and context are of the same steps as the seconds: within a band longer steps may be those of more requests. The steps
    are all.
    """
    ordered = sorted(seen)
    steps = sum(s.steps for s in ordered)
    low, high, passed = (1 - _MIDDLE) / 2 * steps, (1 + _MIDDLE) / 2 * steps, 0.0
    chosen = []
    for s in ordered:
        inside = min(passed + s.steps, high) - max(passed, low)
        passed += s.steps
        if inside > 0.0:
            chosen.append(s._replace(steps=inside))
    return mean(chosen)._replace(steps=steps)


def together(timings: Sequence[StepTiming]) -> tuple[StepTiming, ...]:
    """What several engines, or several phases, have timed: one for each kind and band."""
    kinds: dict[tuple[int, int, bool], list[StepTiming]] = defaultdict(list)
    for t in timings:
        kinds[band_of(t.batch), t.k, t.paused].append(t)
    return tuple(alike[0] if len(alike) == 1 else _one_of(alike) for alike in kinds.values())


def _one_of(alike: Sequence[StepTiming]) -> StepTiming:
    sane = [t for t in alike if math.isfinite(t.seconds)] or alike
    found = middle(Seen(t.seconds, t.batch, t.context, t.steps) for t in sane)
    steps, forwards = sum(t.steps for t in alike), sum(t.forwards for t in alike)
    return replace(
        alike[0], batch=found.batch, seconds=found.seconds, steps=steps, context=found.context, forwards=forwards
    )


def mixed_together(mixed: Sequence[MixedSteps]) -> tuple[MixedSteps, ...]:
    """The same of steps that were not alike: their sums."""
    kinds: dict[tuple[int, int, bool], list[MixedSteps]] = defaultdict(list)
    for m in mixed:
        kinds[band_of(m.batch), m.k, m.prompts].append(m)
    return tuple(alike[0] if len(alike) == 1 else _one_of_mixed(alike) for alike in kinds.values())


def _one_of_mixed(alike: Sequence[MixedSteps]) -> MixedSteps:
    seconds, drafted = sum(m.seconds for m in alike), sum(m.drafted for m in alike)
    of_one = mean(Seen(0.0, m.batch, m.context, m.steps) for m in alike)
    return replace(
        alike[0],
        batch=of_one.batch,
        seconds=seconds,
        steps=round(of_one.steps),
        drafted=drafted,
        context=of_one.context,
    )
