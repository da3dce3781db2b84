"""What a draft is to its trainer: a shape (data, without torch), a kind that handles drafts of a shape, and the module itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draft_training.batch import PackedBatch
from draft_training.checkpoint import fingerprint, write_json, write_tensors
from draft_training.errors import DraftConfigError


class DraftShape(Protocol):
    """Sizes of a draft of any kind, as trainer, engine and checkpoint need them."""

    @property
    def vocab_size(self) -> int:
        """V, the target's."""

    @property
    def hidden_size(self) -> int:
        """H, the target's: width of ``last``, of the policy's embedding and of its head."""

    @property
    def pruned(self) -> bool:
        """Has it a smaller vocabulary, whose head follows the policy's rows."""

    @property
    def parameters(self) -> int:
        """How many numbers it has of its own."""

    def to_hf(self) -> dict[str, Any]:
        """The draft's config.json in the layout that vLLM loads."""


class Draft(Protocol):
    """The module that is trained; its ``state_dict`` is what the engine is sent."""

    def states(self, batch: PackedBatch, embed: Tensor, steps: int) -> Iterator[Tensor]:
        """For each step j [N, .]: what it predicts token t + 2 + j from at row t, fed with the tokens that were sampled."""

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        """The matrix that makes logits of ``states``, and the target's id of each of its rows; None: the same ids."""


Shape = TypeVar("Shape", bound=DraftShape)


class DraftKind(ABC, Generic[Shape]):
    """How drafts of one shape are built, checked and written; ``kinds.kind_of`` finds it by the shape's type."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @abstractmethod
    def build(self, device: torch.device | str, dtype: torch.dtype) -> Any:
        """The module, a ``Draft``, whose parameters ``layers.initialise`` fills."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare names and shapes with those of the module.

        Raises:
            DraftConfigError: naming the first tensors that differ.
        """
        try:
            module = self.build("meta", torch.float32).state_dict()
        except Exception as error:  # transformers judges config.json as well, and raises what it likes
            reason = " ".join(str(error).split())
            raise DraftConfigError(
                f"no model can be built from the draft's config.json: {type(error).__name__}: {reason}; correct it there"
            ) from error
        expected, given = ({name: list(t.shape) for name, t in found.items()} for found in (module, tensors))
        missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        if missing or unknown:
            raise DraftConfigError(
                f"the draft's tensors do not match its config.json: missing {missing[:4]}, unknown {unknown[:4]}"
            )
        if wrong := [name for name, shape in expected.items() if given[name] != shape]:
            name = wrong[0]
            raise DraftConfigError(
                f"{name} has shape {given[name]}, but config.json implies {expected[name]}; {len(wrong)} of {len(given)} tensors "
                "are like it: correct it"
            )

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> str:
        """Write what vLLM serves, config.json and model.safetensors, into an existing folder; returns their fingerprint.

        Raises:
            DraftConfigError: if names or shapes do not match.
        """
        self.check(tensors)
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
        write_json(folder / "config.json", {**self.shape.to_hf(), "torch_dtype": str(dtype).removeprefix("torch.")})
        write_tensors(folder / "model.safetensors", tensors)
        return fingerprint(tensors)
