"""The time that a slice of draft training is a share of: what plain generation would have made the trainer wait for."""

from __future__ import annotations

import statistics
from collections import deque

#: steps whose median is the usual one
_REMEMBERED = 8
#: of the usual step, what one step earns at most
_MOST = 1.5


class SliceBudget:
    """Seconds that steps earn, so that work for drafts is bounded by what drafts can save.

    A step that takes much longer than those before it earns no more training for that: its process was stopped (a debugger, a
    machine that slept), or a validation rolled out in it.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)

    def seconds(self, plain: float) -> float:
        """At most 1.5 times the median of the last eight steps; to be asked once a step.

        Args:
            plain: seconds that the step's generation would have made the trainer wait for without drafts.
        """
        usual = statistics.median_low(self._steps) if self._steps else None
        self._steps.append(plain)
        return plain if usual is None else min(plain, _MOST * usual)
