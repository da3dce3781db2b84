"""SmallLm: a causal LM of transformers behind the interface of a draft (``draft_training.draft.Draft``)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from draft_training.batch import PackedBatch
from draft_training.layers import initialise

if TYPE_CHECKING:
    from draft_training.small_lm import SmallLmShape


@contextmanager
def _own_streams() -> Iterator[None]:
    """Leave torch's and Python's random streams, which are the trainer's, as they were.

    transformers initialises a model from the one, though only ``reset_parameters`` counts here; and what it imports on the way
    draws from the other.
    """
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


class SmallLm(nn.Module):
    """Reads tokens only, so a single step of the unroll teaches all that there is; further ones repeat it, shifted."""

    def __init__(self, config: SmallLmShape, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        place = "meta" if torch.device(device).type == "meta" else "cpu"
        with _own_streams(), torch.device(place):
            self.lm: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()), dtype=dtype)
        self.lm.to(device=device, dtype=dtype)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Under the names of its checkpoint; a tied head is the embedding, and not named twice."""
        tensors = self.lm.state_dict(*args, **kwargs)
        return {n: t for n, t in tensors.items() if not (self.config.tied and n == "lm_head.weight")}

    def reset_parameters(self, generator: torch.Generator) -> None:
        """See ``layers.initialise``."""
        initialise(self.lm, generator)

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        """Its own, [V, h]."""
        weight: Tensor = self.lm.get_output_embeddings().weight
        return weight, None

    def states(self, batch: PackedBatch, embed: Tensor, steps: int) -> Iterator[Tensor]:
        """Its last hidden states [N, h], of token t + 1 + j at row t."""
        parts = torch.split(batch.input_ids, list(batch.lengths))
        ids = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in parts], batch_first=True)
        out = self.lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        flat = torch.cat([out[i, :n] for i, n in enumerate(batch.lengths)])
        row = torch.arange(len(batch), device=flat.device)
        for j in range(steps):
            yield flat[torch.minimum(row + 1 + j, batch.stop)]
