"""What a process that is killed leaves behind is found and removed, and what another one still uses is not: real processes."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_training import folders as locks
from draft_training import kind_of
from draft_training.checkpoint import replacing_folder, settled_folder, write_tensors
from draft_training.draft import DraftKind
from spec_plugin.methods import served
from spec_plugin.plan import own_folders as folders
from spec_plugin.plan.own_folders import own_folder, place_for, sweep_own


@pytest.fixture(autouse=True)
def old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a minute here."""
    monkeypatch.setattr(locks, "_YOUNG_S", 0.0)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """In the place of memory and disk."""
    found = tmp_path / "memory", tmp_path / "disk"
    for name, place in zip(("memory", "disk"), found, strict=True):
        place.mkdir()
        monkeypatch.setattr(folders, name, lambda place=place: place)
        monkeypatch.setattr(served, name, lambda place=place: place, raising=False)
    return found


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], Any]], multiprocessing.Process]]:
    """Runs a function in a process of its own, until it has come as far as it says with ``here``."""
    started = []

    def run(work: Callable[[Callable[[], Any]], Any]) -> multiprocessing.Process:
        context = multiprocessing.get_context("fork")
        there, ready = context.Event(), 30.0

        def here() -> None:
            there.set()
            time.sleep(ready)

        process = context.Process(target=work, args=(here,), daemon=True)
        process.start()
        started.append(process)
        assert there.wait(ready)
        return process

    yield run
    for process in started:
        process.kill()
        process.join()


def killed(process: multiprocessing.Process) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_a_folder_of_ones_own_is_nobody_elses_and_goes_with_the_block(tmp_path: Path) -> None:
    with pytest.raises(KeyError), own_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "draft").write_text("weights")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_said_in_one_line(places, other, caplog) -> None:
    def work(here: Callable[[], None]) -> None:
        with own_folder(places[0]) as memory, own_folder(places[1]):
            (memory / "draft").write_bytes(bytes(1000))
            here()

    process = other(work)
    caplog.set_level(logging.INFO, logger="spec_plugin")
    sweep_own()
    assert [len(list(place.iterdir())) for place in places] == [1, 1], "it lives"
    killed(process)
    assert [len(list(place.iterdir())) for place in places] == [1, 1]
    sweep_own()
    assert [list(place.iterdir()) for place in places] == [[], []]
    sweep_own()
    (line,) = [r.getMessage() for r in caplog.records]
    assert "removed 2 folders of processes that were killed" in line and str(places[0]) in line


@pytest.mark.parametrize("kind", ["another's name", "a file", "a link", "just made"])
def test_nothing_else_is_removed(places, kind, monkeypatch, tmp_path) -> None:
    place, _ = places
    found = place / ("somebody.else" if kind == "another's name" else "spec-plugin.own.x")
    if kind == "a file":
        found.write_text("")
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        found.symlink_to(tmp_path / "elsewhere")
    else:
        found.mkdir()
    if kind == "just made":
        monkeypatch.setattr(locks, "_YOUNG_S", 60.0)
    sweep_own()
    assert list(place.iterdir()) == [found]
    assert kind != "a link" or (tmp_path / "elsewhere").is_dir()


def test_where_there_are_no_locks_nothing_is_removed(places, monkeypatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with own_folder(places[0]) as folder:
        sweep_own()
        assert folder.is_dir()


def test_a_save_that_was_killed_leaves_the_old_draft_and_its_half_goes_with_the_next_one(tmp_path, other) -> None:
    target = tmp_path / "draft"
    with replacing_folder(target) as folder:
        write_tensors(folder / "model.safetensors", {"fc": torch.zeros(2)})

    def work(here: Callable[[], None]) -> None:
        with replacing_folder(target) as folder:
            (folder / "model.safetensors").write_text("half of it")
            here()

    process = other(work)
    with replacing_folder(target) as folder:
        write_tensors(folder / "model.safetensors", {"fc": torch.ones(2)})
    assert len(list(tmp_path.iterdir())) == 2, "the other one is still at work"
    killed(process)
    assert settled_folder(target) == target
    with replacing_folder(target) as folder:
        write_tensors(folder / "model.safetensors", {"fc": torch.ones(2)})
    assert list(tmp_path.iterdir()) == [target]


def test_the_starting_draft_of_a_killed_run_is_removed_by_the_next_one(places, other, monkeypatch) -> None:
    def refused() -> Path:
        raise PermissionError("not this user's alone")

    monkeypatch.setattr(served, "cache_root", refused)

    class Shape:
        def to_hf(self) -> dict[str, Any]:
            return {}

    class Kind(DraftKind[Any]):
        def build(self, device: torch.device | str, dtype: torch.dtype) -> Any:
            return torch.nn.ParameterDict({"fc": torch.zeros(2, device=device, dtype=dtype)})

    kind_of.register(Shape, Kind)  # as a plugin with a draft of its own does

    def work(here: Callable[[], None]) -> None:
        served.served_folder(Shape(), {"fc": torch.zeros(2)})  # type: ignore[arg-type]
        here()

    process = other(work)
    sweep_own()
    (folder,) = places[1].iterdir()
    assert (folder / "model.safetensors").is_file(), "the engine of that run loads it"
    killed(process)
    sweep_own()
    assert list(places[1].iterdir()) == []


def with_free(monkeypatch: pytest.MonkeyPatch, free: dict[Path, int]) -> None:
    def statvfs(place: Path) -> Any:
        return SimpleNamespace(f_bavail=free[place] // 4096, f_frsize=4096)

    monkeypatch.setattr(folders.os, "statvfs", statvfs)
    folders._say_disk.cache_clear()


def test_a_file_goes_into_memory_where_it_fits_and_else_onto_the_disk_and_that_is_said_once(
    places, monkeypatch, caplog
) -> None:
    """A container's shared memory is 64 MB unless somebody asked for more."""
    caplog.set_level(logging.INFO, logger="spec_plugin")
    with_free(monkeypatch, {places[0]: 64 << 20, places[1]: 10 << 30})
    assert place_for(32 << 20) == places[0] and not caplog.records
    assert place_for(33 << 20) == place_for(1 << 30) == places[1], "others write there, too"
    (line,) = [r.getMessage() for r in caplog.records]
    assert "has 64 MB free" in line and "--shm-size" in line and str(places[1]) in line


def test_a_file_that_fits_nowhere_is_refused_with_sizes_and_what_to_do(places, monkeypatch) -> None:
    with_free(monkeypatch, {places[0]: 64 << 20, places[1]: 100 << 20})
    with pytest.raises(OSError, match="a file of 200 MB, and 32 MB to spare") as refused:
        place_for(200 << 20)
    said = str(refused.value)
    assert f"{places[0]} (64 MB free)" in said and f"{places[1]} (100 MB free)" in said and "\n" not in said
    assert "--shm-size" in said and "TMPDIR" in said


def test_a_shared_memory_that_is_really_small_is_left_alone() -> None:
    """In a process with mount points of its own, where the system lets it have them."""

    def work(answer: Any) -> None:
        libc, new_user, new_mounts, private = ctypes.CDLL(None), 0x10000000, 0x20000, 0x44000
        if (
            libc.unshare(new_user | new_mounts)
            or libc.mount(b"none", b"/", None, private, None)
            or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m")
        ):
            answer.send("not allowed")
        else:
            answer.send(str(place_for(1 << 20)))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(30)
    answer = ours.recv()
    process.join()
    if answer == "not allowed":
        pytest.skip("no mount points of one's own here")
    assert folders.memory() == Path("/dev/shm") and answer == str(folders.disk())
