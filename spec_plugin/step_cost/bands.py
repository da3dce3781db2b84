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

from spec_plugin.api.events import StepTiming

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
    kinds: dict[tuple[int, int, bool, bool, bool], list[StepTiming]] = defaultdict(list)
    for t in timings:
        kinds[band_of(t.batch), t.k, t.paused, t.alike, t.prompts].append(t)
    return tuple(of_one[0] if len(of_one) == 1 else _as_one(of_one) for of_one in kinds.values())


def _as_one(kind: Sequence[StepTiming]) -> StepTiming:
    sane = [t for t in kind if math.isfinite(t.seconds)] or kind
    found = (middle if kind[0].alike else mean)(Seen(t.seconds, t.batch, t.context, t.steps) for t in sane)
    sums = {name: sum(getattr(t, name) for t in kind) for name in ("steps", "forwards", "drafted")}
    return replace(kind[0], batch=found.batch, seconds=found.seconds, context=found.context, **sums)
