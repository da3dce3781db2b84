"""The time that a slice of draft training is a share of: the trainer's step, as far as its steps usually take so long."""

from __future__ import annotations

import statistics
import time
from collections import deque

#: steps whose median is the usual one
_REMEMBERED = 8
#: of the usual step, what one step earns at most
_MOST = 1.5


class SliceClock:
    """Seconds since the last slice ended.

    A step that takes much longer than those before it earns no more training for that: its process was stopped (a debugger, a
    machine that slept), or what it waited for is no work of the trainer's own.
    """

    def __init__(self) -> None:
        self._ended = time.monotonic()
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)

    def restart(self) -> None:
        """What was until now is part of no step."""
        self._ended = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """So much of the step is not the trainer's."""
        self._ended += seconds

    def step_seconds(self) -> float:
        """Seconds since the last slice ended, at most 1.5 times the median of the last eight; to be asked once a step."""
        seconds = time.monotonic() - self._ended
        usual = statistics.median_low(self._steps) if self._steps else None
        self._steps.append(seconds)
        return seconds if usual is None else min(seconds, _MOST * usual)
