"""Which tensors a checkpoint holds, from names alone: nothing is read, and torch, whose import takes seconds, stays away."""

from __future__ import annotations

import json
from pathlib import Path


def tensor_names(folder: Path) -> list[str]:
    """The names in a folder of safetensors, from its index where it has one.

    Raises:
        OSError: if it holds none, or a file is torn.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return list(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError) as error:
            raise OSError(f"{index}: {type(error).__name__}: {error}") from error
    names: list[str] = []
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file")
    for file in files:
        try:
            with safe_open(str(file), framework="numpy") as f:
                names += f.keys()
        except SafetensorError as error:
            raise OSError(f"{file}: {error}") from error
    return names
