"""Weight syncs of verl through a file in memory, where engines are apart from the actors on a CPU."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")
from spec_plugin_verl_cpu import file_sync
from spec_plugin_verl_cpu.file_sync import FileCheckpointEngine


def test_weights_go_from_the_first_actor_to_the_engines_in_a_file_that_is_gone_afterwards(monkeypatch):
    monkeypatch.setattr(file_sync, "copy_saved_weights", lambda: None)  # a repair of verl, for good
    first, other, engine = (FileCheckpointEngine(0, is_master=i == 0) for i in range(3))
    sent = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}

    async def sync() -> Path:
        actors, rollouts = FileCheckpointEngine.build_topology(2, 1, [e.prepare() for e in (first, other)])
        folders = [*actors["folder"], *rollouts["folder"]]
        assert len(set(folders)) == 1 and stat.S_IMODE(Path(folders[0]).stat().st_mode) == 0o700
        for one, folder in zip((first, other, engine), folders, strict=True):
            one.init_process_group(folder)
        for one in (first, other):
            await one.send_weights(iter(sent.items()))
        got = {name: tensor async for name, tensor in engine.receive_weights()}
        assert got.keys() == sent.keys() and all(torch.equal(got[n], t) for n, t in sent.items())
        for one in (other, engine, first):
            one.finalize()
        return Path(folders[0])

    folders = [asyncio.run(sync()) for _ in range(2)]
    assert folders[0] != folders[1] and not any(folder.exists() for folder in folders)
