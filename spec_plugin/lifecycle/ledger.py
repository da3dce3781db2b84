"""What drafts earn and what they cost, in seconds for which the trainer's step is shorter or longer.

Earned is generation that the trainer did not wait for: how long the rollout's steps would have taken without drafts (from
its own, as the controller's pairs and timings have them), less what it took, and less what it took to read the ends of
prompts that the prefix cache had: vLLM drops them for the draft's sake, in phases without drafts, too. Where rollouts go on
while the trainer trains, only what would have been left of that behind the trainer's own work counts. What plain steps amid
drafts lose, those of pairs and of the control group, is missing there already. Spent is what was added to the trainer's
process: draft training, harvest, refreshes and self-tests; that part of it may have been hidden, where the trainer waits, is
not counted in its favour.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spec_plugin.api.events import RolloutStats

#: share of a phase for which a trainer may wait whose rollouts are hidden behind its work, and from which they no longer are
_HIDDEN_BELOW, _EXPOSED_FROM = 0.10, 0.15
#: phases in a row that must be so before drafts are found to be of no use, and before they are of use again: a validation is one
_PHASES, _PHASES_BACK = 3, 2
#: by which factor what is told of the time without drafts may be too small
_DOUBT = 1.2


class Ledger:
    """The sums of one process. What was earned only the rank with the link to the engines knows."""

    def __init__(self, overlaps: bool = False) -> None:
        """Nothing earned, nothing spent.

        Args:
            overlaps: do the engines generate while the trainer trains.
        """
        self.overlaps = overlaps
        self._saved: float | None = None  # of the step in progress
        self._spent, self._inside = 0.0, False
        #: of the step in progress: for what its rollouts would have made the trainer wait without drafts
        self.plain_s = 0.0
        self._closed: dict[str, float] = {}  # what the last step's metrics say
        self._saved_so_far = self._spent_so_far = 0.0
        self._began: float | None = None  # the phase
        self._idle_since: float | None = None
        self._waited = 0.0  # in the phase
        self._hidden_phases = self._exposed_phases = 0
        self.hidden = False  # does the trainer not wait for rollouts, whether they are drafted or not

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around work of ours that the trainer's process would not do without drafts."""
        began, outer, self._inside = time.monotonic(), self._inside, True
        try:
            yield
        finally:
            self._inside = outer
            self.spent(time.monotonic() - began)

    def spent(self, seconds: float) -> None:
        """Count seconds that were measured elsewhere; inside ``spending`` they are counted already."""
        self._spent += 0.0 if self._inside else seconds

    def waits(self) -> None:
        """The trainer has nothing to do from here on but to wait for rollouts."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._idle_since = now if self._idle_since is None else self._idle_since

    def works(self) -> None:
        """The trainer has rollouts, and works on them from here on."""
        if self._idle_since is not None:
            self._waited += time.monotonic() - self._idle_since
            self._idle_since = None

    def rolled_out(self, stats: RolloutStats, slowdown: float | None) -> None:
        """A phase is over.

        Args:
            stats: what the engines say of it.
            slowdown: times as long its steps would have taken without drafts; None: not known.
        """
        self.works()  # some trainers wait for rollouts in the weight sync; what they do there besides counts as waiting
        now = time.monotonic()
        phase, self._began = now - (now if self._began is None else self._began), now
        waited, self._waited = self._waited, 0.0
        work = phase - waited
        engines = stats.parts or (stats,)
        if self.overlaps and phase > 0.0:
            self._judge_hidden(max(waited, max(_most_without(e, slowdown) for e in engines) - work) / phase)
        recomputing = max(e.recomputing_seconds for e in engines)
        busy = stats.busy_seconds or stats.seconds
        longer = busy * ((1.0 if slowdown is None else slowdown) - 1.0) - recomputing
        if not math.isfinite(longer):
            return
        behind, without = (max(0.0, seconds - work * self.overlaps) for seconds in (busy, busy + longer))
        self.plain_s += without
        if slowdown is not None or recomputing:
            self._saved = (self._saved or 0.0) + without - behind

    def _judge_hidden(self, share: float) -> None:
        """From the share of a phase for which the trainer waits, or would without drafts."""
        self._hidden_phases = self._hidden_phases + 1 if share < _HIDDEN_BELOW else 0
        self._exposed_phases = self._exposed_phases + 1 if share >= _EXPOSED_FROM else 0
        if self._hidden_phases >= _PHASES:
            self.hidden = True
        elif self._exposed_phases >= _PHASES_BACK:
            self.hidden = False

    def close(self) -> None:
        """A step of the trainer is over."""
        saved, spent = self._saved, self._spent
        self._saved, self._spent, self.plain_s = None, 0.0, 0.0
        self._spent_so_far += spent
        self._saved_so_far += saved or 0.0
        self._closed = {
            "spec/cost_s": spent,
            "spec/saved_so_far_s": self._saved_so_far,
            "spec/cost_so_far_s": self._spent_so_far,
            "spec/net_so_far_s": self._saved_so_far - self._spent_so_far,
        }
        if saved is not None:
            self._closed |= {"spec/saved_s": saved, "spec/net_s": saved - spent}

    def metrics(self) -> dict[str, float]:
        """``spec/…`` sums of the last step, and of the run so far; empty before the first step's end."""
        return dict(self._closed)


def _most_without(stats: RolloutStats, slowdown: float | None) -> float:
    """Seconds for which an engine would have had requests without drafts, at most.

    A drafted step is no shorter than a plain one. And what is told of the whole is not off by more than ``_DOUBT``, were the last
    request one that always had a draft. What lies between the steps takes as long as it does; an engine that says nothing of
    them may have been busy throughout.
    """
    at_most = drafted = stats.tokens_per_forward or 1.0
    if slowdown is not None:
        forwards = sum(s.forwards for s in stats.steps)
        of_all = 1.0 + (drafted - 1.0) * min(1.0, stats.forwards / forwards) if forwards else drafted
        at_most = max(slowdown, min(at_most, _DOUBT * slowdown * drafted / of_all))
    return stats.seconds + (stats.busy_seconds or stats.seconds) * max(0.0, at_most - 1.0)
