"""What a slice of draft training did, and what an evaluation measured."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import accumulate

from draft_training.loss import LossStats
from draft_training.proposals import ProposalStats


@dataclass(frozen=True)
class SliceReport:
    """What a slice of training did and measured; with data parallelism the same on all ranks."""

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
        """From the raw sums of the optimizer steps of all ranks; see the fields for the rest."""
        length, chances, rounds = stats.acceptance_length, stats.chances, int(stats.rounds)
        return cls(steps, tokens, stats.loss, length, chances, rounds, skipped, seconds)


@dataclass(frozen=True)
class Evaluation:
    """What documents that the draft was replayed on tell; with data parallelism the same on all ranks."""

    proposals: ProposalStats  # by each way to propose tokens
    tokens: int  # that went through the draft, all ranks
    seconds: float
    draft_temperature: float = (
        0.0  # of the proposals that the properties are about, one of ``DRAFT_TEMPERATURES``; 0: greedy ones
    )

    @property
    def rounds(self) -> int:
        """Replayed decoding rounds behind the rest; 0: nothing was measured."""
        return round(float(self.proposals.rounds[0]))

    @property
    def chances(self) -> tuple[float, ...]:
        """[J] chance that each drafted token is accepted, given those before it; () when unknown."""
        return self.proposals.chances(self.draft_temperature)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target forward with J drafted tokens, bonus included; 1.0 when nothing was measured."""
        return 1.0 + math.fsum(accumulate(self.chances, operator.mul))
