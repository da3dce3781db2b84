"""SmallLm: a causal LM of transformers behind the interface of a draft (``draft_training.draft.Draft``)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from draft_training.batch import PackedBatch
from draft_training.draft import DraftKind
from draft_training.files import read_json
from draft_training.outside import TARGET
from draft_training.small_lm import SmallLmShape
from draft_training.weights import check_values, read_folder


@contextmanager
def _own_streams() -> Iterator[None]:
    """Leave torch's and Python's random streams, which are the trainer's, as they were.

    transformers initialises a model from the one, though only ``layers.initialise`` counts here; and what it imports on the way
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

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        """The small model's own LM head, [V, h] with its own hidden size h."""
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


class SmallLmKind(DraftKind[SmallLmShape]):
    """A whole model in the layout of transformers."""

    def build(self, device: torch.device | str, dtype: torch.dtype) -> SmallLm:
        """See ``DraftKind``."""
        return SmallLm(self.shape, device, dtype)

    def tensors_of(self, folder: Path) -> dict[str, Tensor]:
        """The model's tensors; a tied head that is named all the same, and frequencies of the rotary embedding, are left out.

        Raises:
            DraftConfigError: if they do not match the shape, or a number is not finite.
            CheckpointError: if a file is missing or torn.
        """
        tied = ("lm_head.weight",) if self.shape.tied else ()
        tensors = {n: t for n, t in read_folder(folder).items() if n not in tied and not n.endswith("inv_freq")}
        self.check(tensors)
        check_values(tensors, folder)
        return tensors


def load_small_lm(
    folder: Path, target: Mapping[str, Any], target_file: str = TARGET
) -> tuple[SmallLmShape, dict[str, Tensor]]:
    """The user's model, checked against the target.

    Args:
        folder: the model's.
        target: the target's config.json.
        target_file: where that was read, for the messages.

    Raises:
        DraftConfigError: if it does not fit.
        CheckpointError: if a file is missing or torn.
    """
    file = folder / "config.json"
    shape = SmallLmShape.from_hf(read_json(file), target, str(file), target_file)
    return shape, SmallLmKind(shape).tensors_of(folder)
