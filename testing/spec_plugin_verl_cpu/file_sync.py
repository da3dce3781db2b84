"""Weight syncs between processes of one machine, through a file in memory: verl's own engines for that need cards.

Used through verl's extension point ``rollout.checkpoint_engine.custom_backend_module``, as backend ``file``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from spec_plugin.plan.own_folders import memory, own_folder, place_for
from spec_plugin_verl_cpu.platform import copy_saved_weights

BACKEND = "file"
_POLL_S = 0.01


@CheckpointEngineRegistry.register(BACKEND)
class FileCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The first actor writes, every rollout worker reads."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        """verl's arguments.

        Args:
            bucket_size: not used: the file is one bucket.
            is_master: is this the first actor.
        """
        copy_saved_weights()
        self._master = is_master
        self._folder, self._ours = Path(), ExitStack()

    def prepare(self) -> str:
        """A new folder for each sync, made by the first actor; the others' answers are not read."""
        return str(self._ours.enter_context(own_folder(memory()))) if self._master else ""

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[str]) -> Any:
        """Hand every actor and rollout worker the folder that the first actor made."""
        return {"folder": [metadata[0]] * actors}, {"folder": [metadata[0]] * rollouts}

    def init_process_group(self, folder: str) -> None:
        """Note the folder of this sync."""
        self._folder = Path(folder)

    def finalize(self) -> None:
        """Remove the folder: all have read."""
        self._ours.close()

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Walk the weights on every rank, since gathering them is collective; the first one writes."""
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if self._master:
            place = place_for(sum(tensor.nbytes for tensor in tensors.values()))
            file = self._ours.enter_context(own_folder(place)) / "weights"
            save_file(tensors, file)
            (self._folder / "weights").symlink_to(file)  # the others wait for it where all were told to

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the file, then hand its tensors on."""
        file = self._folder / "weights"
        while not file.exists():
            await asyncio.sleep(_POLL_S)
        for name, tensor in load_file(file).items():
            yield name, tensor
