"""What a self-test is asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SelfTestPlan:
    """One start-up self-test of one engine."""

    prompts: Sequence[Sequence[int]]  # token ids, a few short prompts; the first four are sampled from
    sampling: Mapping[str, Any]  # the run's own ``temperature``, ``top_p``, ``top_k``, …
    k: int  # tokens drafted per step while testing
    vocab_size: int  # of the target
    alpha: float  # chance of rejecting a correct engine
    #: in which as much is tested as fits, break-even included; where that is less than the least that proves anything, the
    #: test takes longer
    seconds: float
    max_num_seqs: int  # the engine's
    limit: float | None = None  # hard limit in seconds; None: ``seconds``
    whole: bool = False  # can only 0 and k tokens be drafted
    adapter: Any = None  # vLLM's LoRARequest that the run's own requests come with, if they do

    @property
    def level(self) -> float:
        """Error level of each of the three statistical tests: counts, log-probs, and counts while k is switched."""
        return self.alpha / 3

    @property
    def hard_limit(self) -> float:
        """Seconds."""
        return self.seconds if self.limit is None else self.limit

    @property
    def timed(self) -> tuple[int, ...]:
        """Tokens drafted per step of which it is measured what they cost."""
        return (0, self.k) if self.whole else tuple(dict.fromkeys((0, 1, min(3, self.k), self.k)))
