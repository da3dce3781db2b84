"""EAGLE-3 drafts: their module built, their folders written as vLLM serves them and read in the layouts of all makers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_training.checkpoint import replacing_folder, settled_folder
from draft_training.config import DraftConfig
from draft_training.draft import DraftKind
from draft_training.errors import DraftConfigError
from draft_training.files import read_json
from draft_training.layouts import canonical_tensors, read_config
from draft_training.model import Eagle3Draft
from draft_training.outside import TARGET, blaming
from draft_training.weights import check_values, read_folder


class Eagle3Kind(DraftKind[DraftConfig]):
    """One decoder layer over the target's hidden states."""

    def build(self, device: torch.device | str, dtype: torch.dtype) -> Eagle3Draft:
        """See ``DraftKind``."""
        return Eagle3Draft(self.shape, device=device, dtype=dtype)


def save_draft(path: str | Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> str:
    """Write a folder that vLLM serves with ``method: eagle3``: config.json and model.safetensors, all or nothing.

    Args:
        path: the folder; an existing one is replaced.
        config: the draft's.
        tensors: exactly what ``DraftTrainer.engine_tensors`` returns; never embed_tokens.

    Returns:
        The fingerprint of ``tensors``.

    Raises:
        DraftConfigError: if names or shapes do not match ``config``.
    """
    with replacing_folder(path) as folder:
        return Eagle3Kind(config).write(folder, tensors)


def load_draft(
    path: str | Path, target_config: Mapping[str, Any] | None = None, target_file: str = TARGET
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read a draft folder in vLLM's, EAGLE's, NVIDIA's or speculators' layout.

    Embeddings, and a full-vocabulary LM head, are dropped: the policy's serve.

    Args:
        path: the folder.
        target_config: the target's config.json; needed only if the draft's names no auxiliary layers.
        target_file: where that was read, for the messages.

    Returns:
        The config and the tensors, on the CPU, in the stored dtype, under the names of ``Eagle3Draft``.

    Raises:
        DraftConfigError: if the draft is of a kind that cannot be trained, its tensors do not match its config, or its numbers
            are not finite or map no tokens of the target.
        CheckpointError: if the folder lacks a file, or a file is torn.
    """
    folder = settled_folder(path)
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise DraftConfigError(f"{folder} holds {pickled[0]}, and only safetensors are read: convert it first")
    file = folder / "config.json"
    config = read_config(read_json(file), target_config, str(file), target_file)
    stored = read_folder(folder)
    with blaming(str(folder)):
        tensors = canonical_tensors(config, stored)
        Eagle3Kind(config).check(tensors)
    check_values(tensors, folder)
    return config, tensors
