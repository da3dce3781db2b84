"""TrainingSchedule: where a draft is in its life, and so how fast it learns and how far it is unrolled."""

from __future__ import annotations

from draft_training.settings import TrainSettings

#: of so many optimizer steps one is unrolled as far as the engine drafts
_DEEP_EVERY = 4


class TrainingSchedule:
    """Learning rates, unrolled steps and tokens of an optimizer step; steps are counted from the draft's birth.

    A draft that was trained before has nothing to gain from large steps, and much to lose: it learns at the floor of the rates.
    A newborn one begins with large rates.
    """

    def __init__(self, settings: TrainSettings, *, newborn: bool) -> None:
        self._settings = settings
        self.newborn = newborn  # learns at the rates of a draft that begins knowing nothing
        self.scale = 1.0  # a further factor of the learning rates, for training that has an end
        self.shallow = min(settings.first_steps, settings.ttt_steps)  # unrolled in most steps

    def unroll(self, step: int) -> int:
        """Steps of the training-time test at an optimizer step: few, and in every fourth as many as the engine drafts.

        What few steps teach mostly holds for further ones, and leaves time for more text; but a draft that never saw its own
        states so deep may collapse there. Measured by ``examples/bench/curves.py``.
        """
        return self._settings.ttt_steps if step % _DEEP_EVERY == _DEEP_EVERY - 1 else self.shallow

    def rate(self, step: int) -> float:
        """Factor of the full learning rates at an optimizer step.

        After a linear warm-up an untrained draft's falls as one over the root of the steps. The policy never stops moving, so the
        factor stays at its floor.
        """
        warm = min(1.0, (step + 1) / max(1, self._settings.warmup_steps))
        return warm * max(self._settings.lr_floor, self._youth(step)) * self.scale

    def _youth(self, step: int) -> float:
        return float((1 + step / self._settings.decay_steps) ** -0.5) if self.newborn else 0.0

    def young(self, step: int) -> bool:
        """Is a newborn draft still learning at more than the floor of its rates: then it lacks text above all."""
        return self._youth(step) > self._settings.lr_floor

    def tokens(self, step: int) -> int:
        """Tokens of an optimizer step: its positions, unrolled, stay as many, and so its memory and its time."""
        return self._settings.tokens_per_step * self.shallow // self.unroll(step)
