"""How many steps the training-time test unrolls: as far as drafting would reach."""

from __future__ import annotations

from typing import Any

from draft_training.loss import LossStats

#: share of the rounds that must reach the last unrolled token before one more is unrolled; and below which one less is
_LONGER, _SHORTER = 0.4, 0.15
#: rounds behind that share: the longer the chain, the fewer responses are long enough to replay it
_ROUNDS = 32
#: optimizer steps at one length before it is judged, and what each further one leaves of those before it
_JUDGED_AFTER, _FADES = 4, 0.8


class Unroll:
    """The number of unrolled steps, from how often a draft's chain of tokens survives to the last of them.

    A token beyond the unrolled ones is drafted from states that training never saw: acceptance collapses there. A token that
    is hardly ever reached costs training time and earns nothing. So a newborn draft begins short, and grows as its last
    position is reached; the lengths that pay in the engine follow.
    """

    def __init__(self, first: int, most: int, *, grown: bool = False) -> None:
        """Begin to unroll.

        Args:
            first: unrolled steps to begin with, and the least; cut to ``most``.
            most: the engine's k.
            grown: the draft was trained before: begin with ``most``, so that nothing is unlearned.
        """
        self._least, self._most = min(first, most), most
        self.steps = most if grown else self._least
        self._reached, self._rounds, self._seen = 0.0, 0.0, 0

    def observe(self, stats: LossStats) -> None:
        """Judge by one optimizer step's statistics, all ranks' together; all ranks come to the same."""
        self._reached = _FADES * self._reached + float(stats.accepted[-1])
        self._rounds = _FADES * self._rounds + float(stats.rounds)
        self._seen += 1
        if self._seen < _JUDGED_AFTER:
            return
        share = self._reached / self._rounds if self._rounds else 0.0
        if share >= _LONGER and self._rounds >= _ROUNDS and self.steps < self._most:
            self.steps += 1
        elif share < _SHORTER and self.steps > self._least:
            self.steps -= 1
        else:
            return
        self._restart()

    def _restart(self) -> None:
        self._reached, self._rounds, self._seen = 0.0, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Steps and running acceptance as JSON values, for ``load_state_dict``."""
        return {"steps": self.steps, "reached": self._reached, "rounds": self._rounds, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, within the present bounds; an empty one changes nothing."""
        if state:
            self.steps = min(self._most, max(self._least, int(state["steps"])))
            self._reached, self._rounds, self._seen = (
                float(state["reached"]),
                float(state["rounds"]),
                int(state["seen"]),
            )
