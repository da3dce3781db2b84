"""Checkpoints: digests of tensors, and folders that appear whole or not at all; safetensors and JSON only."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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
        sha.update(_described(name, tensor))
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


#: 32-bit words that are summed at a time, each with a factor of its own
_BLOCK = 1 << 16
#: how a fingerprint begins, which a sha256 does not
_MARK = "f-"


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of 64 bits over sorted names, dtypes, shapes and bytes, made where the tensors lie: 16 hex digits behind "f-".

    It tells what a fault does to weights, not what somebody might forge: each 32-bit word is multiplied by an odd number that
    belongs to its place, modulo 2^64, so any one changed word changes it, and other changes go unseen once in 2^32 at most.
    Nothing but the sum leaves the device, and a CPU makes it about as fast as a sha256.
    """
    header = hashlib.blake2b(digest_size=8)
    sums: list[Tensor] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        header.update(_described(name, tensor))
        sums.append(_checksum(tensor))
    total = int.from_bytes(header.digest(), "little")
    # all of them at once: one wait for the device
    for one in torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else ():
        total = total * 0x9E3779B97F4A7C15 + one
    return f"{_MARK}{total & (2**64 - 1):016x}"


def digest_like(told: str, tensors: Mapping[str, Tensor]) -> str:
    """What these tensors should have been told by: a fingerprint, if ``told`` is one, else a sha256."""
    return fingerprint(tensors) if told.startswith(_MARK) else digest(tensors)


def _described(name: str, tensor: Tensor) -> bytes:
    return f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{list(tensor.shape)}\0".encode()


def _checksum(tensor: Tensor) -> Tensor:
    """The sum over a tensor's bytes, [] int64, on its device."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 4 else data  # words begin at multiples of four
    even = data.numel() // 4 * 4
    words, rest = data[:even].view(torch.int32), data[even:]
    factors, of_blocks = _factors(data.device)
    whole = words.numel() // _BLOCK
    # blocks: what a CPU's cache holds; elsewhere few calls that take little memory
    at_once = 1 if data.device.type == "cpu" else 32
    blocks = torch.split(words[: whole * _BLOCK].view(whole, _BLOCK), at_once) if whole else ()
    last = words[whole * _BLOCK :]
    sums = [(block.long() * factors).sum(1) for block in blocks]
    sums += [(part.long() * factors[: part.numel()]).sum(0, keepdim=True) for part in (last, rest)]
    joined = torch.cat(sums)
    if joined.numel() > _BLOCK:  # beyond 16 GiB
        of_blocks = of_blocks.repeat(-(-joined.numel() // _BLOCK))
    total: Tensor = (joined * of_blocks[: joined.numel()]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    """[2, _BLOCK] int64, odd, of words and of blocks; the same in every process, of no random stream of the trainer's (law 1)."""
    stream = np.random.Generator(np.random.PCG64(0x5EC))
    odd = stream.integers(0, 2**64, (2, _BLOCK), dtype=np.uint64) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


def row_digests(tensor: Tensor) -> list[str]:
    """A digest of each row (all of the last dimension) of a weight, in order: whoever stacks or splits matrices by rows has the
    same rows. A vector is stacked along its one dimension, as the biases of queries, keys and values are: its rows are stretches
    of four.
    """
    width = tensor.shape[-1] if tensor.dim() > 1 else 4 if tensor.numel() % 4 == 0 else 1
    rows = tensor.detach().to("cpu").contiguous().view(-1, width).view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=8).hexdigest() for row in rows]


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
    whole = Path(os.path.abspath(target))  # of "." as well
    return whole.parent / f".{whole.name}.previous"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
