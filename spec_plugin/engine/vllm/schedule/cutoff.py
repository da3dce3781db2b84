"""The cut-off: a draft that does not pay, in the middle of a rollout phase, is dropped for the rest of it (law 7).

Between two phases the controller decides. Within one, a draft may turn out to be worth nothing: training praised it in vain,
or the policy has jumped. Counted are, for each drafted request and step, the tokens that came out against those that plain
decoding would have made in the same time, and what is missing is added up, never below zero: Page's cumulative sum
(E. S. Page, Continuous inspection schemes, Biometrika 41, 1954). What is dropped then are the batch sizes at which the draft
would not pay with the tokens that it made since the sum was last zero: for a worthless draft all of them, for one that was
too dear for a full batch not those of its tail. A draft that does not pay costs a phase about ``_LOST`` tokens' time, and a few
steps: where many requests end in the same one, it makes little in that step, and more in those around it.

Dropping is exact: k then depends on tokens that were sampled already, never on the ones to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: tokens that plain decoding would be ahead when the draft is dropped
_LOST = 32.0
#: verification steps of single requests before which nothing is dropped: fewer tell the controller nothing of the acceptance
_DRAFTS = 64
#: steps of as many requests as the largest had, that what has been lost must have taken at least
_STEPS = 4
#: what is kept must pay by this factor
_KEPT = 1.05


class DraftCutoff:
    """Adds up what drafting has lost in one phase of one engine, and drops the draft when that is too much."""

    def __init__(self, table: list[int], break_even: Sequence[float]) -> None:
        """Start a phase with nothing lost.

        Args:
            table: k by batch size, the one that the engine reads; ``drop`` writes into it.
            break_even: tokens of a verification step at which drafting is as fast as not, by batch size; empty: never drop.
        """
        self._table, self._break_even = table, list(break_even)
        self._drafts = 0
        self._reset()

    def _reset(self) -> None:
        self._behind = 0.0
        self._recent = self._recent_tokens = 0  # verification steps since then, and what they made
        self._largest = 0  # requests of a step since then

    def emitted(self, batch: int, tokens: int) -> None:
        """A verification step of one request made so many tokens, in a step of so many requests."""
        if not self._break_even:
            return
        batch = min(batch, len(self._break_even) - 1)
        self._drafts += 1
        self._behind += self._break_even[batch] - tokens
        self._recent, self._recent_tokens = self._recent + 1, self._recent_tokens + tokens
        self._largest = max(self._largest, batch)
        if self._behind <= 0:
            self._reset()

    @property
    def due(self) -> bool:
        """True once drafting has cost this phase enough."""
        return self._behind > _LOST and self._drafts >= _DRAFTS and self._recent >= _STEPS * self._largest

    def drop(self) -> bool:
        """Draft nothing more in this phase at the batch sizes that would need more tokens than were made; only when ``due``.

        Returns:
            True if no batch size drafts any more.
        """
        length = self._recent_tokens / self._recent
        for batch, needed in enumerate(self._break_even):
            if length < _KEPT * needed:
                self._table[batch], self._break_even[batch] = 0, 0.0  # drafts that are under way are nobody's loss
        self._reset()
        return not any(self._table)


def undrafted_beside_drafts(output: Any) -> int:
    """Requests that decoded without a draft in a step in which others had one: they paid for it, and gained nothing.

    Of a method that often finds none; where a model drafts for all, those without are plain because they must be.

    Args:
        output: vLLM's ``SchedulerOutput``.
    """
    drafted = output.scheduled_spec_decode_tokens
    if not any(drafted.values()):
        return 0
    return sum(n == 1 and not drafted.get(r) for r, n in output.num_scheduled_tokens.items())
