"""What is known of a draft's acceptance: by the engine where it drafted, by training's prediction where it did not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from draft_training.acceptance import conditional_acceptance
from spec_plugin.api.events import RolloutStats
from spec_plugin.api.method import KNOWS_NOTHING
from spec_plugin.step_cost.chances import acceptance_of, tokens_per_step

logger = logging.getLogger(__name__)

#: Verification steps below which a rollout says nothing about acceptance.
_MIN_DRAFTS = 64
#: Engine and training disagree about acceptance beyond this ratio of the gain only when they are misaligned.
_MISALIGNED = 0.5
#: factor by which what the first positions gain has risen where later ones must be looked at again
_OUT_OF_DATE = 2.0
#: tokens a step from which a prediction can be compared with the engine at all
_COMPARABLE = 1.2


class AcceptanceEstimate:
    """Chance of each drafted position to be accepted, given those before it; never forgotten, but replaced by what is newer."""

    def __init__(self) -> None:
        #: by training, or seen by the engine itself while k was 0; empty: nothing
        self._predicted: tuple[float, ...] = ()
        self._served: tuple[float, ...] = ()  # the prediction under which the engine drafts
        #: of tokens that became part of a response, in the last rollout that drafted enough
        self._measured: tuple[float, ...] | None = None
        self._deepest: tuple[float, ...] = ()  # the same, beyond that one's largest k from rollouts before it
        self._correction = 1.0  # of predictions
        self.age = 0  # rollouts since something was measured
        self.knows_nothing = False  # was the draft tried, and found to be as good as untrained
        self._warned = False

    @property
    def curve(self) -> tuple[float, ...] | None:
        """By position, of a token that becomes one of the response; beyond its end the last one holds. None: nothing is known.

        Beyond the largest k of the last rollout, what training predicts or an earlier rollout has shown; else the engine finds
        out. Beyond what training unrolls nothing is promised before it was drafted.
        """
        if self._measured is not None:
            deeper = self._predicted if len(self._predicted) > len(self._measured) else self._deepest
            return (*self._measured, *deeper[len(self._measured) :]) or None
        if not self._predicted:
            return None
        first, *more = self._predicted  # the whole gain is in proportion to the first chance
        return (first * self._correction, *more, 0.0)

    def predicted(self, chances: Sequence[float]) -> None:
        """Training says this of a draft that is now installed: it replaces what a draft before it has shown, if that rests."""
        self._predicted = tuple(chances)
        if self._predicted and self._measured is not None and (self.age or self.knows_nothing):
            self._measured = None

    def serving(self, drafts: bool) -> None:
        """A rollout begins, with drafts or without."""
        self._served = self._predicted if drafts else ()

    def rolled_out(self, stats: RolloutStats) -> None:
        """A rollout is over."""
        drafted = stats.drafts > 0
        if drafted and stats.forwards >= _MIN_DRAFTS:
            whole = acceptance_of(stats, past_end=True)  # as training predicts it: it knows no ends of responses
            self.age, self.knows_nothing = 0, tokens_per_step(whole, len(whole)) < KNOWS_NOTHING
            self._measured = acceptance_of(stats)
            deeper = self._deepest[len(self._measured) :]
            self._deepest = (*self._measured, *(() if self._much_better(self._measured) else deeper))
            self._compare(self._measured, whole)
            return
        self.age += not drafted
        if not drafted and stats.shadow_rounds >= _MIN_DRAFTS:
            # the engine itself has seen what drafting would have done
            self._predicted, self._measured = conditional_acceptance(stats.shadow_per_pos, stats.shadow_rounds), None

    def _much_better(self, measured: Sequence[float]) -> bool:
        """Are the first positions so much better than they were that what is known of later ones is out of date."""
        width = min(len(measured), len(self._deepest))
        now, then = (tokens_per_step(chances, width) - 1.0 for chances in (measured, self._deepest))
        return now > _OUT_OF_DATE * then

    def _compare(self, measured: Sequence[float], whole: Sequence[float]) -> None:
        """Prediction and engine, where enough was drafted, as far as both have looked."""
        width = min(len(self._served), len(measured))
        predicted = tokens_per_step(self._served, width)
        if predicted <= _COMPARABLE:
            return
        ratio, as_trained = ((tokens_per_step(c, width) - 1.0) / (predicted - 1.0) for c in (measured, whole))
        # the correction falls at once and rises by halves: a draft that training overrates is tried once
        self._correction = max(0.0, min(1.0, ratio, 0.5 * self._correction + 0.5 * ratio))
        if as_trained < _MISALIGNED and not self._warned:
            self._warned = True
            logger.warning(
                "spec-plugin: the engine's acceptance length is %.2f where draft training predicted %.2f; if this stays, "
                "trainer and engine run the draft differently (auxiliary layers, norms or positions)",
                tokens_per_step(whole, width),
                predicted,
            )
