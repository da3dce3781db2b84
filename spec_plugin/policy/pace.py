"""How much of ``spec.train_share`` draft training takes: all of it while that raises acceptance, less when it no longer does."""

from __future__ import annotations

import math
import statistics
from collections import deque

#: judged slices that are compared with as many before them
WINDOW = 8
#: mean acceptance length must have risen by this share to be worth as much training as before; and more is due where it lies that
#: much below the best that was held
_RISES, _FALLS = 0.01, 0.015
#: where this share of all that can be accepted is accepted, in a few slices, more of it is worth less than training costs
_NEARLY_ALL, _FEW = 0.9, 2
#: the share never falls below this part of what is allowed: below it there is little to gain and a draft to lose
LEAST = 1 / 4


class Pace:
    """One of three answers every ``WINDOW`` slices: half as much, as before, or twice as much; at the top half as much at once.

    A policy that moves lowers the acceptance of a draft that stands still, so the share comes to rest where training just keeps
    up. Acceptance is that of the draft on newer text than it was trained on. Error rates: ``tests/unit/policy/test_pace.py``.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._held, self._full = 0.0, 0  # best mean that was held, and windows in a row with all of the share
        self._judged: deque[float] = deque(maxlen=2 * WINDOW)

    def judged(self, acceptance: float, most: float = math.inf) -> None:
        """One more slice.

        Args:
            acceptance: acceptance length of the draft as it was before it.
            most: that it can be, k + 1.
        """
        self._judged.append(acceptance)
        top = statistics.fmean(list(self._judged)[-_FEW:])
        if self.share > LEAST and len(self._judged) >= _FEW and top >= _NEARLY_ALL * most:
            self.share, self._held = max(LEAST, self.share / 2.0), max(self._held, top)
            self._judged.clear()
            return
        if len(self._judged) < 2 * WINDOW:
            return
        values = list(self._judged)
        before, now = statistics.fmean(values[:WINDOW]), statistics.fmean(values[WINDOW:])
        settled = self.share == 1.0 and self._full >= 1  # what all of the share holds, and not what less of it has lost
        self._held = now if settled else max(self._held, now)
        self._full = self._full + 1 if self.share == 1.0 else 0
        if now < (1.0 - _FALLS) * self._held:
            self.share = min(1.0, 2.0 * self.share)
        elif (1.0 - _FALLS) * before <= now < (1.0 + _RISES) * before:
            self.share = max(LEAST, self.share / 2.0)
        for _ in range(WINDOW):
            self._judged.popleft()
