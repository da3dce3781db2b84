"""Tensors of checkpoints from outside: read without trust in header or index, and looked at before an engine gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.files import MASK_EMBEDDING, opened, weight_files

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: of a pruned draft: they map its vocabulary to the target's
_MAPS = ("d2t", "t2d")


def read_tensors(file: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The tensors of one safetensors file, on the CPU.

    Args:
        file: that holds them.
        wanted: which of them, by name; the others are not read.

    Raises:
        CheckpointError: if it is missing, torn, or of a kind that torch does not know.
    """
    with opened(file, "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys() if wanted(name)}  # noqa: SIM118 (not a dict)


def refuse_broken(file: Path) -> None:
    """Look at the numbers of one safetensors file, a tensor at a time; those of a kind that is not known here pass.

    Raises:
        CheckpointError: if it is torn.
        DraftConfigError: if a number is not finite.
    """
    with opened(file, "pt") as f:
        for name in f.keys():  # noqa: SIM118
            if (tensor := f.get_tensor(name)).dtype in _FLOATS:
                _refuse_infinite(name, tensor, file)


def refuse_broken_mask(folder: Path) -> None:
    """Look at the vector that stands for an unknown token, in a DFlash draft's folder that has one.

    Whether it is as wide as the draft, and of its token, vLLM says itself as the engine starts.

    Raises:
        CheckpointError: if it is no such vector.
        DraftConfigError: if a number is not finite.
    """
    file = folder / MASK_EMBEDDING
    if not file.is_file():  # as the hub's library asks: nobody reads what is there then
        return
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")  # numbers only, as vLLM reads it
        vector: Tensor = (found["embedding"] if isinstance(found, dict) else found).reshape(-1)
    except Exception as error:  # of pickle, zipfile and torch, each with classes of its own
        raise CheckpointError(
            f"{file} holds no vector that can be read as numbers ({type(error).__name__}); fetch or export the draft again"
        ) from error
    _refuse_infinite("the mask's embedding", vector, file)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder: of the files that its index names, or of every safetensors file.

    Raises:
        CheckpointError: if there is no such file, one is torn, or two hold a tensor of the same name.
        DraftConfigError: if the index is none.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    homes: dict[str, Path] = {}
    for file in files:
        found = read_tensors(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(
                f"{twice[0]} is both in {homes[twice[0]]} and in {file.name}; remove one of the files"
            )
        tensors |= found
        homes |= dict.fromkeys(found, file)
    return tensors


def check_values(tensors: Mapping[str, Tensor], where: object) -> None:
    """Are these numbers that a draft may have.

    Args:
        tensors: by name; ``d2t`` and ``t2d`` are maps of a vocabulary.
        where: file or folder, for the messages.

    Raises:
        DraftConfigError: for a tensor that is not finite, or of a kind that holds no weights.
    """
    for name, tensor in tensors.items():
        if name in _MAPS:
            continue
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DraftConfigError(
                f"{name} in {where} is {kind}: expected float32, bfloat16 or float16; convert it (a quantized draft cannot be "
                "refreshed)"
            )
        if not tensor.numel():
            raise DraftConfigError(f"{name} in {where} is empty ({list(tensor.shape)}); take a whole draft")
        _refuse_infinite(name, tensor, where)


def _refuse_infinite(name: str, tensor: Tensor, where: object) -> None:
    low, high = (float(extreme) for extreme in torch.aminmax(tensor)) if tensor.numel() else (0.0, 0.0)
    if abs(low) < torch.inf and abs(high) < torch.inf:  # NaN, which it is where any number is, is below nothing
        return
    flat = tensor.reshape(-1)
    odd = (~torch.isfinite(flat)).nonzero().reshape(-1)
    raise DraftConfigError(
        f"{name} in {where} holds {odd.numel()} numbers that are not finite, the first {float(flat[odd[0]])} at {int(odd[0])} of "
        f"{flat.numel()}: the draft is broken; train it again, or take another"
    )
