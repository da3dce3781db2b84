"""Checkpoints: digests of tensors, and folders that appear whole or not at all; safetensors and JSON only."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_training.errors import CheckpointError
from draft_training.folders import claimed, sweep


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 (hex) over sorted names, dtypes, shapes and bytes; independent of device, strides and dict order."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        sha.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{list(tensor.shape)}\0".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def row_digests(tensors: Iterable[Tensor]) -> list[str]:
    """A digest of each row (all of the last dimension) of some weights, each digest once: whoever stacks or splits matrices by
    rows has the same rows. A vector is stacked along its one dimension, as the biases of queries, keys and values are: its rows
    are stretches of four.
    """
    found: set[str] = set()
    for tensor in tensors:
        width = tensor.shape[-1] if tensor.dim() > 1 else 4 if tensor.numel() % 4 == 0 else 1
        rows = tensor.detach().to("cpu").contiguous().view(-1, width)
        for row in rows.view(torch.uint8).numpy():
            found.add(hashlib.blake2b(row.data, digest_size=8).hexdigest())
    return sorted(found)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file and wait until it is on disk."""
    save_file({name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}, str(file))
    _sync(file)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON file and wait until it is on disk."""
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    _sync(file)


@contextlib.contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """A fresh folder to write into, which takes the place of ``path`` when the block ends without an error.

    Readers see the old folder or the new one. A rename cannot replace a folder that holds files, so the old one steps
    aside for an instant; a crash in that instant leaves it under its other name, where ``settled_folder`` finds it. What a
    process has written that was killed in the block is removed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, f".{glob.escape(target.name)}.*.new")
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}.new")
    fresh.mkdir()
    try:
        with claimed(fresh):
            yield fresh
            _sync(fresh)
            _put_in_place(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _put_in_place(fresh: Path, target: Path) -> None:
    aside = _aside(target)
    if target.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(target, aside)
    try:
        os.replace(fresh, target)
    except OSError:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise
    _sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def settled_folder(path: str | Path) -> Path:
    """The folder to read: ``path``, or the old one that a crash left aside while it was being replaced.

    Raises:
        CheckpointError: if neither exists.
    """
    target = Path(path)
    for candidate in (target, _aside(target)):
        if candidate.is_dir():
            return candidate
    found = "is no folder" if target.exists() else "does not exist"
    raise CheckpointError(f"{target} {found}: give the folder of a checkpoint")


def is_settled(path: str | Path) -> bool:
    """Is there a folder for ``settled_folder`` to read."""
    target = Path(path)
    return target.is_dir() or _aside(target).is_dir()


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
