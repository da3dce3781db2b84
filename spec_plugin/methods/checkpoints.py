"""What a checkpoint holds, without torch, whose import takes seconds: names of tensors, and the map of a pruned vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draft_training.files import opened, places

#: the map's names in vLLM's, EAGLE's and speculators' layout
_MAPS = ("d2t", "model.d2t", "draft_id_to_target_id")


def tensor_names(folder: Path) -> list[str]:
    """The names in a folder of safetensors, from its index where it has one.

    Raises:
        FileNotFoundError: if it holds none.
        CheckpointError: if a file is torn.
        DraftConfigError: if its index is none.
    """
    indexed = places(folder)
    if indexed is not None:
        return list(indexed)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file")
    names: list[str] = []
    for file in files:
        with opened(file, "numpy") as f:
            names += f.keys()
    return names


def vocabulary_map(folder: Path) -> Any | None:
    """[Vd] the offsets of a pruned draft, as numpy's array: draft id i is target id ``i + d2t[i]``; None: it is not pruned.

    Raises:
        CheckpointError: if a file is torn.
    """
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file, "numpy") as f:
            for name in set(_MAPS) & set(f.keys()):
                return f.get_tensor(name)
    return None
