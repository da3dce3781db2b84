"""The guard: a draft that does not pay, in the middle of a rollout phase, is dropped for the rest of it (law 7).

Between two phases the controller decides. Within one, a draft may turn out to be worth nothing: training praised it in vain,
or the policy has jumped. The guard counts, for each drafted request and step, the tokens that came out against those that
plain decoding would have made in the same time, and adds up what is missing, never below zero: Page's cumulative sum
(E. S. Page, Continuous inspection schemes, Biometrika 41, 1954). What is dropped then are the batch sizes at which the draft
would not pay with the tokens that it made since the sum was last zero: for a worthless draft all of them, for one that was
too dear for a full batch not those of its tail. A draft that does not pay costs a phase about ``_LOST`` tokens' time.

Dropping is exact: k then depends on tokens that were sampled already, never on the ones to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: tokens that plain decoding would be ahead when the draft is dropped
_LOST = 32.0
#: verification steps of single requests before which nothing is dropped: the controller wants to know the acceptance, too
_DRAFTS = 64
#: what is kept must pay by this factor
_KEPT = 1.05


class Guard:
    """Watches one phase of one engine."""

    def __init__(self, table: list[int], break_even: Sequence[float], pause: Callable[[], Any]) -> None:
        """Begin.

        Args:
            table: k by batch size, the one that the engine reads.
            break_even: tokens of a verification step at which drafting is as fast as not, by batch size; empty: no guard.
            pause: leaves out the draft's forward pass from now on.
        """
        self._table, self._break_even, self._pause = table, list(break_even), pause
        self._drafts = 0
        self._reset()

    def _reset(self) -> None:
        self._behind = 0.0
        self._recent = self._recent_tokens = 0  # verification steps since then, and what they made

    def emitted(self, batch: int, tokens: int) -> None:
        """A verification step of one request made so many tokens, in a step of so many requests."""
        if not self._break_even:
            return
        self._drafts += 1
        self._behind += self._break_even[min(batch, len(self._break_even) - 1)] - tokens
        self._recent, self._recent_tokens = self._recent + 1, self._recent_tokens + tokens
        if self._behind <= 0:
            self._reset()

    @property
    def losing(self) -> bool:
        """True once drafting has cost this phase enough."""
        return self._behind > _LOST and self._drafts >= _DRAFTS

    def drop(self) -> None:
        """Draft nothing more in this phase at the batch sizes that would need more tokens than were made."""
        length = self._recent_tokens / self._recent
        for batch, needed in enumerate(self._break_even):
            if length < _KEPT * needed:
                self._table[batch], self._break_even[batch] = 0, 0.0  # drafts that are under way are nobody's loss
        self._reset()
        if not any(self._table):
            self._pause()


def undrafted_beside_drafts(output: Any) -> int:
    """Requests that decoded without a draft in a step in which others had one: they paid for it, and gained nothing.

    Of a method that often finds none; where a model drafts for all, those without are plain because they must be.
    """
    drafted = output.scheduled_spec_decode_tokens
    if not any(drafted.values()):
        return 0
    return sum(n == 1 and not drafted.get(r) for r, n in output.num_scheduled_tokens.items())


class GuardedDrafts:
    """Mixed into a scheduler of vLLM: has a ``Guard`` look at what its verification steps make."""

    guard: Guard | None = None
    _batch = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own; afterwards the draft may be dropped."""
        self._batch = len(scheduler_output.num_scheduled_tokens)
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        log = getattr(self, "step_log", None)
        if self.guard is not None and log is not None and log.ragged:
            for _ in range(undrafted_beside_drafts(scheduler_output)):
                self.guard.emitted(self._batch, 1)
        if self.guard is not None and self.guard.losing:
            self.guard.drop()
        return result

    def make_spec_decoding_stats(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's own, which it calls for each drafted request of a step; the guard takes note."""
        if self.guard is not None and num_draft_tokens:
            self.guard.emitted(self._batch, num_accepted_tokens + 1)
        return super().make_spec_decoding_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)  # type: ignore[misc]
