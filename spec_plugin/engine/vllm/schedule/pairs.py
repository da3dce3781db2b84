"""Plain decoding for a few steps now and then while the others draft, timed beside the drafted steps before and after.

Whether drafts pay can be told only by two measurements that have everything else in common: the engine, the batch, the context,
the machine and what else runs on it. Seconds of one rollout against another's have none of that in common. So the scheduler
itself leaves the drafts out for a stretch of ``STEPS`` steps, which is exact at any moment (``scheduler``), and notes the mean
of the drafted medians before and behind it, and the plain one, as a pair. Where requests end meanwhile, as they do in most
batches all the time, that mean is of about as many requests as the stretch between. The draft goes on reading the text (k = 0,
not paused), so that its KV cache stays complete; what that takes is known from the start-up calibration, where paused and reading
drafts take turns.

The first stretch comes as soon as there are steps to compare it with; from then on stretches take a share of the steps
(``Schedule.plain_share``), which the controller makes small where the answer is clear.
"""

from __future__ import annotations

import statistics
from collections import deque

from spec_plugin.api.events import StepPair
from spec_plugin.engine.vllm.schedule.steps import Timed

#: noted steps of a stretch, and drafted ones before and behind it; one more of each is left out, in which the engine changes over
STEPS = 4
#: steps of other kinds (a prefill, a request of the control group) after which a stretch is given up
_PATIENCE = 3 * STEPS
#: share by which a batch of a pair's steps may differ from the first one
_RANGE = 1 / 4


class PairedSteps:
    """Decides which steps of a phase are plain, and makes pairs of what was timed; knows nothing of vLLM."""

    def __init__(self, variable_length: bool = False) -> None:
        """``variable_length``: steps verify different numbers of tokens, so that their mean counts."""
        self._middle = statistics.fmean if variable_length else statistics.median
        self._credit = STEPS + 1.0  # plain steps that may be taken; the first stretch is given
        self._found: list[StepPair] = []
        self.follow(0.0)

    def follow(self, share: float) -> None:
        """A phase begins in which this share of the steps may be plain; 0: none."""
        self.share = share
        self._before: deque[Timed] = deque(maxlen=STEPS)
        self._start()

    def _start(self) -> None:
        self.plain = False  # are the next steps to be scheduled without drafts
        self._stretch: list[Timed] = []
        self._after: list[Timed] = []
        self._passed = 0  # steps of other kinds since the stretch began

    def note(self, step: Timed | None) -> None:
        """A step is over; None: of no kind that is noted."""
        if self.share <= 0.0:
            return
        if step is None:
            self._pass_over()
        elif step.k:
            self._note_drafted(step)
        elif self.plain:
            self._note_plain(step)

    def take(self) -> list[StepPair]:
        """Pairs since the last call."""
        found, self._found = self._found, []
        return found

    def _pass_over(self) -> None:
        self._passed += 1
        if (self.plain or self._stretch) and self._passed > _PATIENCE:
            self._before.clear()
            self._start()

    def _note_drafted(self, step: Timed) -> None:
        self._credit = min(self._credit + self.share, 2.0 * (STEPS + 1))
        if self._stretch and not self.plain:
            self._after.append(step)
            if not self._alike(step, self._before[0]):
                self._start()
            elif len(self._after) > STEPS:
                self._pair()
            return
        if self.plain:
            return  # drafted before the stretch was asked for
        if self._before and not self._alike(step, self._before[0]):
            self._before.clear()
        self._before.append(step)
        if len(self._before) == STEPS and self._credit >= STEPS + 1:
            self._start()
            self.plain = True

    def _note_plain(self, step: Timed) -> None:
        self._credit -= 1.0
        self._stretch.append(step)
        if not self._alike(step, self._before[0]):
            self._before.clear()
            self._start()
        self.plain = self.plain and len(self._stretch) <= STEPS

    @staticmethod
    def _alike(step: Timed, other: Timed) -> bool:
        same_k = step.k == other.k or 0 in (step.k, other.k)
        return same_k and abs(step.batch - other.batch) <= _RANGE * max(step.batch, other.batch)

    def _pair(self) -> None:
        plain, after = self._stretch[1:], self._after[1:]
        drafted = [self._middle([s.seconds for s in side]) for side in (self._before, after)]
        self._found.append(
            StepPair(
                batch=round(statistics.fmean(step.batch for step in plain)),
                k=after[0].k,
                drafted_seconds=statistics.fmean(drafted),
                plain_seconds=self._middle([s.seconds for s in plain]),
            )
        )
        self._before = deque(after, maxlen=STEPS)
        self._start()
