"""Which of a mixture's experts a decoding step touches: what its weights' reading time follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.outside import is_size, text_part

#: what families call the number of experts of a layer
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
#: what families call the number of experts that each token is routed to
TAKEN = ("num_experts_per_tok", "moe_k")


@dataclass(frozen=True)
class Experts:
    """How many experts a layer has, and how many of them each token is routed to."""

    total: int
    taken: int  # by each token

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> Experts | None:
        """Of a target's config.json; None where it has none, or does not say."""
        text = text_part(hf)
        total, taken = (next((text[n] for n in names if is_size(text.get(n))), 0) for names in (EXPERTS, TAKEN))
        return cls(total, min(total, taken)) if total and taken else None

    def touched(self, tokens: float) -> float:
        """Experts that at least one of so many tokens takes: E (1 - (1 - top/E)^n), if routing is even.

        MoESD, arXiv 2505.19645, section 3: from a few dozen tokens on nearly all of them are read, and verification
        reads no more than plain decoding; before that each drafted token brings experts of its own.

        Args:
            tokens: n.
        """
        missed: float = (1.0 - self.taken / self.total) ** tokens
        return self.total * (1.0 - missed)
