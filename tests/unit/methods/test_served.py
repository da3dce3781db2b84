"""Where the engine finds the starting draft."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from spec_plugin_conformance.tiny import tiny_config

from draft_training import DraftTrainer, TrainSettings, digest, load_draft
from draft_training.config import DraftConfig
from spec_plugin.methods import served
from spec_plugin.methods.served import served_folder

TARGET = tiny_config().to_dict()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "spec_plugin"


def a_draft(seed: int = 0) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    config = DraftConfig.from_target(TARGET)
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=seed)
    return config, trainer.engine_tensors(torch.float32)


def test_one_draft_has_one_folder_from_run_to_run(root: Path) -> None:
    config, tensors = a_draft()
    folder = served_folder(config, tensors)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder.parent == root and served_folder(config, a_draft()[1]) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert served_folder(*a_draft(seed=1)) != folder
    found, read = load_draft(folder, TARGET)
    assert found == config and digest(read) == digest(tensors)


@pytest.mark.parametrize("damage", ["other weights", "cut off", "no config"])
def test_what_is_not_as_it_was_written_is_written_again(root: Path, damage: str) -> None:
    config, tensors = a_draft()
    folder = served_folder(config, tensors)
    file = folder / "model.safetensors"
    if damage == "other weights":
        other = served_folder(*a_draft(seed=1))
        file.write_bytes((other / "model.safetensors").read_bytes())
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:100])
    else:
        (folder / "config.json").unlink()
    assert served_folder(config, tensors) == folder
    assert digest(load_draft(folder, TARGET)[1]) == digest(tensors)


@pytest.mark.parametrize("trouble", ["others may write", "a link", "a file"])
def test_a_cache_that_is_not_ours_alone_is_not_used(root: Path, tmp_path: Path, trouble: str) -> None:
    if trouble == "others may write":
        root.mkdir()
        root.chmod(0o777)
    elif trouble == "a link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.write_text("")
    config, tensors = a_draft()
    folder = served_folder(config, tensors)
    assert tmp_path not in folder.parents
    assert digest(load_draft(folder, TARGET)[1]) == digest(tensors)


def test_only_some_drafts_stay_and_none_that_was_used_today_goes(root: Path) -> None:
    folders = [served_folder(*a_draft(seed)) for seed in range(served._KEPT + 2)]
    assert all(f.is_dir() for f in folders)
    for age, folder in enumerate(folders):
        old = time.time() - 2 * 86_400 - age
        os.utime(folder, (old, old))
    newest = served_folder(*a_draft(seed=99))
    assert newest.is_dir() and sum(f.is_dir() for f in folders) == served._KEPT - 1
    assert [f.is_dir() for f in folders][: served._KEPT - 1] == [True] * (served._KEPT - 1)


def test_a_draft_that_another_engine_has_written_meanwhile_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = a_draft()
    looked: list[bool] = []
    holds = served._holds

    def first_look_comes_before_the_other_engines_write(folder: Path, of: str) -> bool:
        looked.append(holds(folder, of))
        if len(looked) == 1:
            monkeypatch.undo()  # what the other engine writes is written for good
            monkeypatch.setenv("VLLM_CACHE_ROOT", str(root.parent))
            served_folder(config, tensors)
            monkeypatch.setattr(served, "_holds", first_look_comes_before_the_other_engines_write)
            monkeypatch.setattr(os, "replace", refused)
        return looked[-1]

    def refused(source: Path, target: Path) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(served, "_holds", first_look_comes_before_the_other_engines_write)
    assert served_folder(config, tensors).parent == root


def test_a_folder_that_vanishes_while_old_ones_are_looked_for_is_nobodys_trouble(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_folder(*a_draft(seed=1))
    gone = root / ".other.new"
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([*listed(folder), *[gone] * (folder == root)]))
    assert served_folder(*a_draft()).parent == root
