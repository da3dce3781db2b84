"""What the kit reads of a run's checkpoint: the policy's tensors, and torch's random state, of each backend of actors."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """Reads one backend's checkpoints; both functions take the actor's folder and the number of ranks."""

    policy: Callable[[Path, int], dict[str, Tensor]]  # by name, with the rank before it where each has a part
    random_state: Callable[[Path, int], dict[str, str]]  # digests


def _fsdp_policy(folder: Path, ranks: int) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    for rank in range(ranks):
        state: Mapping[str, Any] = _load(folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        parts |= {f"rank {rank}: {name}": getattr(value, "_local_tensor", value) for name, value in state.items()}
    return parts


def _fsdp_random_state(folder: Path, ranks: int) -> dict[str, str]:
    files = {f"rank {rank}": folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)}
    return {f"{who}: torch": _digest(_load(file)["rng"]["cpu"]) for who, file in files.items()}


def _megatron_policy(folder: Path, _ranks: int) -> dict[str, Tensor]:
    """Whole tensors under Hugging Face's names, as mbridge exports them."""
    parts: dict[str, Tensor] = {}
    for file in sorted((folder / "model" / "huggingface").glob("*.safetensors")):
        parts |= load_file(file)
    return parts


def _megatron_random_state(folder: Path, _ranks: int) -> dict[str, str]:
    """Of each part of the model; ranks that have the same part write once."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder / "extra" / "dist_ckpt")
    keys = [key for key in reader.read_metadata().state_dict_metadata if key.startswith("rng_state/")]
    state: dict[str, Any] = {key: io.BytesIO() for key in keys}
    load(state, storage_reader=reader, no_dist=True)
    return {f"{key}: torch": _digest(_innermost(value)["torch_rng_state"]) for key, value in state.items()}


def _innermost(value: Any) -> Any:
    """Out of the lists that Megatron puts around an object: of shards, of data-parallel ranks."""
    return _innermost(value[0]) if isinstance(value, list) else value


def _load(file: Path) -> Any:
    return torch.load(file, weights_only=False)  # the run's own file


def _digest(state: Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


FSDP = Format(_fsdp_policy, _fsdp_random_state)
MEGATRON = Format(_megatron_policy, _megatron_random_state)
