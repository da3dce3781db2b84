"""The controller's states: when drafts are tried, served and rested, as one table (``NEXT``)."""

from __future__ import annotations

from enum import Enum

from spec_plugin.api.speculation import Reason, Speculation

#: rollouts that a draft which is not served rests before it is tried again
REST = 7


class Sign(Enum):
    """What was seen or is expected; of several the first that applies."""

    DROPPED = "the engines dropped the draft within the rollout"
    PAYS = "drafts are predicted to pay"
    DUE = "it has rested long enough"
    NOTHING = "none of these"


_UNTRIED, _TRYING, _SERVING, _RESTING = (
    Speculation.UNTRIED,
    Speculation.TRYING,
    Speculation.SERVING,
    Speculation.RESTING,
)

#: (state, what is seen) -> the next state; a pair that is not here leaves it as it is. No state is without a way out.
NEXT: dict[tuple[Speculation, Sign], Speculation] = {
    # behind a rollout
    (_TRYING, Sign.DROPPED): _RESTING,
    (_SERVING, Sign.DROPPED): _RESTING,
    # before one
    (_UNTRIED, Sign.PAYS): _TRYING,
    (_UNTRIED, Sign.DUE): _TRYING,
    (_TRYING, Sign.PAYS): _SERVING,
    (_TRYING, Sign.NOTHING): _RESTING,
    (_TRYING, Sign.DUE): _RESTING,
    (_SERVING, Sign.NOTHING): _RESTING,
    (_SERVING, Sign.DUE): _RESTING,
    (_RESTING, Sign.PAYS): _SERVING,
    (_RESTING, Sign.DUE): _TRYING,
}


class States:
    """Where a run stands in the table, and for how long."""

    def __init__(self) -> None:
        self.now = Speculation.UNTRIED
        self.tried = False  # was the draft ever served
        self._plain = 0  # rollouts in a row without drafts
        self._begins = False  # was a try chosen, and no rollout sampled since
        self.why = Reason.NO_DRAFT_YET  # it does not draft, where it does not

    @property
    def due(self) -> bool:
        """Has it rested long enough to be tried."""
        return self._plain >= REST

    @property
    def serves(self) -> bool:
        """Is the draft served, or tried."""
        return self.now in (_TRYING, _SERVING)

    def rolled_out(self, drafted: bool, dropped: bool) -> None:
        """Behind a rollout."""
        self.tried, self._begins = self.tried or drafted, False
        self._plain = 0 if drafted else self._plain + 1
        if dropped:
            self._move(Sign.DROPPED, Reason.BELOW_BREAK_EVEN)

    def before(self, pays: bool, due: bool, why: Reason) -> Speculation:
        """Before a rollout: what it does.

        Args:
            pays: are drafts predicted to pay.
            due: are they to be tried, unless they are.
            why: not, if they are not.
        """
        if not self._begins:  # else it is asked once more before the same rollout
            self._move(Sign.PAYS if pays else Sign.DUE if due else Sign.NOTHING, why)
        return self.now

    def _move(self, sign: Sign, why: Reason) -> None:
        before, self.now, self.why = self.now, NEXT.get((self.now, sign), self.now), why
        self._begins = self.now is _TRYING and before is not _TRYING
