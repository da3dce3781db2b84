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
        """From the raw sums of the optimizer steps, or of the evaluated documents, of all ranks; see the fields for the rest."""
        length, chances, rounds = stats.acceptance_length, stats.chances, int(stats.rounds)
        return cls(steps, tokens, stats.loss, length, chances, rounds, skipped, seconds)
