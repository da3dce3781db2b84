"""What DraftTrainer needs of a kind of draft: its shape, which makes, checks, writes and reads it, and the module itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draft_training.errors import DraftConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draft_training.batch import PackedBatch


def refuse_others(shape: DraftShape, found: Mapping[str, Tensor]) -> None:
    """Raise ``DraftConfigError`` unless names and shapes are those of the module that ``shape`` builds."""
    import torch

    try:
        expected = shape.build("meta", torch.float32).state_dict()
    except Exception as error:  # transformers judges config.json as well, and raises what it likes
        reason = " ".join(str(error).split())
        raise DraftConfigError(
            f"no model can be built from the draft's config.json: {type(error).__name__}: {reason}; correct it there"
        ) from error
    wanted, given = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (expected, found))
    if wrong := sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n)):
        told = ", ".join(f"{n}: {given.get(n, 'missing')}, expected {wanted.get(n, 'nothing')}" for n in wrong[:3])
        raise DraftConfigError(f"{len(wrong)} tensors do not fit the draft's config.json: {told}")


class DraftShape(Protocol):
    """The configuration of a draft."""

    @property
    def vocab_size(self) -> int:
        """V, the target's."""

    @property
    def draft_vocab_size(self) -> int:
        """V, unless pruned."""

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
        """config.json as vLLM reads it."""

    def build(self, device: torch.device | str, dtype: torch.dtype) -> Any:
        """The module, a ``Draft``, its parameters uninitialised."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ``DraftConfigError`` unless these are its tensors."""

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> str:
        """Write what vLLM serves into an existing folder; returns the digest."""

    def read(self, folder: Path) -> tuple[DraftShape, dict[str, Tensor]]:
        """What ``write`` wrote."""


class Draft(Protocol):
    """The module that is trained; its ``state_dict`` is what the engine is sent."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise."""

    def states(self, batch: PackedBatch, embed: Tensor, steps: int) -> Iterator[Tensor]:
        """For each step j [N, .]: what it predicts token t + 2 + j from at row t, fed with the tokens that were sampled."""

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        """The matrix that makes logits of ``states``, and the target's id of each of its rows; None: the same ids."""
