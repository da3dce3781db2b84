"""SliceReport: what a slice of draft training, or an evaluation, did and measured."""

from __future__ import annotations

from dataclasses import dataclass

from draft_training.loss import LossStats


@dataclass(frozen=True)
class SliceReport:
    """What a slice of training, or an evaluation, did and measured; with data parallelism the same on all ranks."""

    steps: int  # optimizer steps taken
    tokens: int  # tokens that went through the draft, all ranks
    loss: float  # mean KL summed over steps, nats; 0.0 when nothing was measured
    #: see LossStats.acceptance_length; 1.0 when nothing was measured. Of a slice of a young draft: on prompts, too
    acceptance_length: float
    chances: tuple[float, ...]  # [J] chance that each drafted token is accepted, given those before it; () when unknown
    rounds: int  # replayed decoding rounds behind acceptance_length and chances
    skipped: int  # steps given up because loss or gradients were not finite
    seconds: float

    @classmethod
    def of(cls, stats: LossStats, *, steps: int, tokens: int, skipped: int, seconds: float) -> SliceReport:
        """Divide raw sums; see the fields for the rest.

        Args:
            stats: of the optimizer steps, or of the evaluated documents, of all ranks.
            steps: optimizer steps taken.
            tokens: of all ranks.
            skipped: steps given up.
            seconds: that it took.
        """
        return cls(
            steps=steps,
            tokens=tokens,
            loss=stats.loss,
            acceptance_length=stats.acceptance_length,
            chances=stats.chances,
            rounds=int(stats.rounds),
            skipped=skipped,
            seconds=seconds,
        )
