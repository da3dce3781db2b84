"""What sampled proposals need on vLLM's second model runner: what replaces a rejected one is drawn independently of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as set_for_now

import torch

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch

#: added to the position that places a draft's noise in its request's random stream; no text is as long. vLLM's own since 0.29,
#: ``_DRAFT_NOISE_SALT`` in ``vllm/v1/worker/gpu/sample/gumbel.py``
SALT = 1 << 30


class _Speculator:
    """Of no engine: its model's logits are the states that it reads, and what else a version asks of it is None."""

    model = SimpleNamespace(compute_logits=lambda states: states)

    def compute_draft_logits(self, states: Any, _step: int = 0) -> Any:
        return states

    def _maybe_predict_acceptance(self, *_logits: Any) -> None:
        pass

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def draft_has_the_targets_noise(sample_draft: Callable[..., Any]) -> bool:
    """True if a proposal is drawn with the noise by which its replacement is: of the same position, and not told apart.

    Raises:
        ValueError: if nothing was drawn.
    """
    drawn: list[bool] = []

    def gumbel_sample(
        logits: Any, _rows: Any, _temperature: Any, _seeds: Any, pos: Any, *_: Any, is_drafting: bool = False, **__: Any
    ) -> Any:
        drawn.append(not is_drafting and int(pos.max()) < SALT)
        return logits.argmax(dim=-1)

    one, positions = torch.zeros(1, dtype=torch.int64), torch.tensor([20])
    with set_for_now.dict(inspect.unwrap(sample_draft).__globals__, gumbel_sample=gumbel_sample):
        sample_draft(_Speculator(), torch.zeros(1, 4), positions, one, torch.ones(1), one, one, torch.zeros(1, 1, 4))
    if not drawn:
        raise ValueError("it drew no proposal by gumbel_sample")
    return any(drawn)


def with_noise_of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, which draws each proposal as if it stood ``SALT`` tokens later in the text."""

    @functools.wraps(original)
    def sample_draft(self: Any, hidden_states: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, hidden_states, positions + SALT, *args, **kwargs)

    return sample_draft


#: for an engine that samples its proposals on the V2 model runner, before its worker is made
NOISE_PATCHES = (
    Patch(
        name="draft_noise",
        symbol="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft",
        reason="with draft_sample_method=probabilistic on the V2 model runner a rejected token was replaced by a draw with the "
        "very noise that had drawn it, so up to 6 % of the probability lay on other tokens than the policy's",
        upstream="vLLM PR 54282, mended in 0.29.0 by the same offset",
        versions="0.24.0, 0.25.1, 0.26.0, 0.27.1 and 0.28.0 have it, sources read; their kernels run in Triton's interpreter; a "
        "GPU has not",
        needed=draft_has_the_targets_noise,
        replacement=with_noise_of_its_own,
        guard=Guard(
            parameters=(
                "self",
                "hidden_states",
                "positions",
                "idx_mapping",
                "temperature",
                "seeds",
                "draft_step",
                "draft_logits",
            ),
            landmarks=("return gumbel_sample(", "positions + 1,"),
        ),
    ),
)
