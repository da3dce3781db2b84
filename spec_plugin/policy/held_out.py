"""HeldOut: what the draft is worth on text that it has not trained on, measured within a share of the time for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_training import DraftTrainer, Evaluation
from draft_training.parts import Part
from spec_plugin.policy.proposals import Proposals

#: share of the time for draft training in which the draft is measured, in the mean
SHARE = 0.15
#: tokens on which each rank measures it: at most; the first time, when nobody knows what they take; and at least, else it waits
MOST, FIRST, LEAST = 1024, 256, 128
#: tokens of one part: short ones come from many places
EACH = 256
#: tokens before each part that the draft's attention may read, as it reads the whole response in the engine
CONTEXT = 512


class HeldOut:
    """Measures the draft, on as many tokens as the time put aside for it pays for: in each slice, or in one of several."""

    def __init__(self, proposals: Proposals) -> None:
        """Nothing is measured yet. ``proposals`` are told what the draft would make, and choose what ``report`` is about."""
        self._proposals = proposals
        #: of the draft as it was then, on newer text than all that it had been trained on, by a policy that had moved since: what
        #: the engine would have accepted. On text of the slice itself every draft looks good. None: nothing was measured yet.
        self.report: Evaluation | None = None
        self._put_aside = 0.0  # seconds
        self._token_seconds: float | None = None  # what a token took, lately

    def tokens(self, seconds: float) -> int:
        """On how many tokens to measure in the coming slice; 0: it can not be paid for yet.

        Args:
            seconds: that the slice may take in all.
        """
        self._put_aside += SHARE * max(0.0, seconds)
        if self._token_seconds is None:
            return FIRST
        self._put_aside = min(
            self._put_aside, MOST * self._token_seconds
        )  # time does not pile up where it is not needed
        payable = self._put_aside / self._token_seconds
        return min(MOST, int(payable * (1.0 + 1e-9))) if payable >= LEAST else 0

    def measure(self, trainer: DraftTrainer, k: int, parts: Callable[[], Sequence[Part]]) -> bool:
        """Replay the draft on them (collective, in ``trainer.working``).

        Args:
            trainer: of the draft.
            k: most tokens that the engine drafts.
            parts: this rank's, of ``HiddenBuffer.newest``; there may be none.

        Returns:
            Whether any rank had text to measure it on.
        """
        found = trainer.evaluate(parts, k, CONTEXT, self._proposals.sampling)
        if found.tokens:
            mine = found.seconds / max(1, found.tokens // trainer.ranks)
            self._token_seconds = mine if self._token_seconds is None else (self._token_seconds + mine) / 2.0
            self._put_aside = max(0.0, self._put_aside - found.seconds)
        if found.rounds:
            self.report = self._proposals.judged(found)
        return bool(found.rounds)
