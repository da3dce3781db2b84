"""Drawing proposals at the price of a product with the draft's head, not of three: torch's exponential noise is slow on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch

#: vLLM's: a request of a lower temperature takes the likeliest token
_GREEDY = 1e-5


def by_inversion(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The original's distribution and draw, by one uniform number a row in the place of one exponential number a token."""

    @functools.wraps(original)
    def compute_probs_and_sample_next_token(
        logits: Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False
    ) -> tuple[Tensor, Tensor]:
        if sampling_metadata.all_greedy:
            return original(logits, sampling_metadata, use_fp64_gumbel)
        temperature = sampling_metadata.temperature
        greedy = temperature < _GREEDY
        probs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).softmax(dim=-1, dtype=torch.float32)
        # in float64, and strictly beyond the drawn point: a token without probability is never drawn
        sums = probs.cumsum(-1, dtype=torch.float64)
        point = torch.rand(len(sums), 1, dtype=torch.float64) * sums[:, -1:]
        drawn = torch.searchsorted(sums, point, right=True).squeeze(1).clamp_max(sums.shape[1] - 1)
        return torch.where(greedy, probs.argmax(dim=-1), drawn), probs

    compute_probs_and_sample_next_token.inverts = True  # type: ignore[attr-defined]
    return compute_probs_and_sample_next_token


PROPOSALS = (
    Patch(
        name="drawn_proposals",
        symbol="vllm.v1.spec_decode.llm_base_proposer:compute_probs_and_sample_next_token",
        reason="with a vocabulary of 49k an exponential number for each token took a third of the time of the draft's head, "
        "and a step of 8 requests with 3 sampled proposals 1.25 times as long as with greedy ones",
        upstream="a question of speed on CPUs, no issue",
        versions="0.29.0",
        optional=True,
        needed=lambda function: not getattr(function, "inverts", False),
        replacement=by_inversion,
        guard=Guard(
            parameters=("logits", "sampling_metadata", "use_fp64_gumbel"),
            landmarks=("temperature < _SAMPLING_EPS", "softmax(dim=-1, dtype=torch.float32)"),
        ),
    ),
)
