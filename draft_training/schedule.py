"""TrainingSchedule: where a draft is in its life, and so how fast it learns and how far it is unrolled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draft_training.settings import TrainSettings
from draft_training.unroll import Unroll


class TrainingSchedule:
    """Learning rates, unrolled steps and tokens of an optimizer step.

    A draft that was trained before has nothing to gain from large steps, and much to lose: it learns at the floor of the rates
    and is unrolled as far as the engine drafts. A newborn one begins with large rates and few unrolled steps.
    """

    def __init__(self, settings: TrainSettings, *, newborn: bool) -> None:
        self._settings = settings
        self.newborn = newborn  # begins knowing nothing
        self.scale = 1.0  # a further factor of the learning rates, for training that has an end
        self.unroll = Unroll(settings.first_steps, settings.ttt_steps, grown=not newborn)

    def restart(self) -> None:
        """Unroll, and learn at the rates, as an untrained draft does: what was given turned out to know nothing."""
        self.newborn = True
        self.unroll = Unroll(self._settings.first_steps, self._settings.ttt_steps)

    def rate(self, step: int) -> float:
        """Factor of the full learning rates at an optimizer step.

        After a linear warm-up an untrained draft's falls as one over the root of the steps. The policy never stops moving, so the
        factor stays at its floor.
        """
        settings = self._settings
        warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        young = (1 + step / settings.decay_steps) ** -0.5 if self.newborn else 0.0
        return warm * max(settings.lr_floor, young) * self.scale

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step: its positions, unrolled, stay as many, and so its memory and its time."""
        settings = self._settings
        return settings.tokens_per_step * min(settings.first_steps, self.unroll.steps) // self.unroll.steps

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; ``scale`` is set anew by whoever uses it."""
        return {"unroll": self.unroll.state_dict(), "newborn": self.newborn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; what it lacks, as one of an earlier version does, stays as it is."""
        self.unroll.load_state_dict(state.get("unroll", {}))
        self.newborn = bool(state.get("newborn", self.newborn))
