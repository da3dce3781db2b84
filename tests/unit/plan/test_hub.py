"""Drafts by name: of the hub, at a revision, known for a policy; against a cache of the hub that the test makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from builders.frozen import HF
from huggingface_hub import constants, errors

from draft_training import DraftTrainer, TrainSettings
from draft_training.config import DraftConfig
from draft_training.eagle3 import save_draft
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.lifecycle.manager import built_in_method
from spec_plugin.plan.hub import DraftNotHereError, draft_folder

TARGET = TargetInfo("m", HF, "float32", max_num_seqs=8)
QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}


def policy(path: str, config: dict[str, Any]) -> TargetInfo:
    return TargetInfo(path, config, "bfloat16")


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub: Path, name: str, *revisions: str, **files: bytes) -> list[Path]:
    """Folders of a model in the cache, one for each branch."""
    root, found = hub / f"models--{name.replace('/', '--')}", []
    for i, revision in enumerate(revisions):
        commit = f"{i:040x}"
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        folder = root / "snapshots" / commit
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / file.replace("__", ".")).write_bytes(content)
        found.append(folder)
    return found


def test_a_folder_is_a_folder_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "known").mkdir()
    for draft in ("owner/name", "known", str(tmp_path)):
        assert draft_folder(draft, fetch=True) == draft
    for draft in ("/no/such/folder", "./no/such", "a/b/c", "draft"):
        assert draft_folder(draft, fetch=True) == draft, "its reader says that it is not there"


def test_a_draft_of_the_hub_is_taken_from_its_cache_at_the_revision_that_is_asked_for(hub):
    main, other = cached(hub, "owner/name", "main", "v2", model__safetensors=b"")
    assert draft_folder("owner/name", fetch=True) == str(main)
    assert draft_folder("owner/name@v2", fetch=True) == str(other)
    assert draft_folder(f"owner/name@{other.name}", fetch=False) == str(other)


def test_law_8_what_the_configs_of_a_draft_name_as_code_is_left_out_and_the_draft_is_taken(hub):
    """As what speculators writes: ``auto_map`` names a class of its own, beside which the hub has the file."""
    (folder,) = cached(hub, "owner/name", "main", model__safetensors=b"1", notes__json=b"[]")
    blob = folder.parents[1] / "blobs" / "1"
    blob.parent.mkdir()
    blob.write_text(
        json.dumps({"auto_map": {"": "eagle3.Config"}, "hidden_size": 64, "text": {"auto_map": {"AutoModel": "x.Y"}}})
    )
    (folder / "config.json").symlink_to("../../blobs/1")
    found = Path(draft_folder("owner/name", fetch=True))
    assert found != folder and json.loads((found / "config.json").read_text()) == {"hidden_size": 64, "text": {}}
    assert (found / "model.safetensors").read_bytes() == b"1" and (found / "notes.json").is_file()
    assert draft_folder("owner/name", fetch=False) == str(found), "one copy for a process"
    assert "auto_map" in blob.read_text(), "the hub's cache is as it was"


def test_a_home_folder_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "draft").mkdir()
    assert draft_folder("~/draft", fetch=True) == str(tmp_path / "draft")
    with pytest.raises(SpecConfigError, match="is no path"):
        draft_folder("~nobody-of-this-name/draft", fetch=True)


def test_what_is_not_here_is_fetched_by_a_run_alone(hub):
    with pytest.raises(DraftNotHereError, match="owner/name is not in this machine's cache: the run fetches it"):
        draft_folder("owner/name", fetch=False)
    with pytest.raises(
        SpecConfigError, match=r"could it be fetched .*: run `hf download owner/name` where there is a network"
    ):
        draft_folder("owner/name", fetch=True)
    cached(hub, "owner/name", "main", config__json=b"{}")
    with pytest.raises(DraftNotHereError, match="is in this machine's cache only in part"):
        draft_folder("owner/name", fetch=False)
    with pytest.raises(SpecConfigError, match=r"has no \*\.safetensors: weights in other formats are not loaded"):
        draft_folder("owner/name", fetch=True)


def test_nothing_but_configs_safetensors_and_a_masks_vector_is_asked_of_the_hub(monkeypatch, tmp_path):
    asked: dict[str, Any] = {}
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *names, **options: asked.update(options) or str(tmp_path)
    )
    draft_folder("owner/name@main", fetch=True)
    assert asked == {
        "revision": "main",
        "allow_patterns": ["*.json", "*.safetensors", "mask_embedding.pt"],
        "local_files_only": False,
    }


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.RepositoryNotFoundError, "owner/name is not there, or you may not see it: correct the name"),
        (errors.GatedRepoError, "asks for consent: accept its terms on the hub, and log in"),
        (errors.RevisionNotFoundError, "has no revision v9; leave @v9 out"),
        (ConnectionError, "could not be fetched: ConnectionError$"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(monkeypatch, error, says):
    def refuses(*names: str, **options: Any) -> str:
        made = error.__new__(error)
        made.args = ("on purpose",)
        raise made

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuses)
    with pytest.raises(SpecConfigError, match=says):
        draft_folder("owner/name@v9", fetch=True)


def test_a_draft_of_the_hub_starts_a_run_and_one_of_another_size_is_refused_with_both_numbers(hub):
    (folder,) = cached(hub, "owner/name", "main")
    config = DraftConfig.from_target(HF)
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=0)
    folder.rmdir()
    save_draft(folder, config, trainer.engine_tensors(torch.float32))
    spec = SpecConfig.parse({"draft": "owner/name"})
    method = built_in_method(spec, TARGET)
    assert method is not None and method.name == "eagle3" and method.pretrained and method.draft is not None
    wide = replace(TARGET, hf_config=HF | {"hidden_size": 128, "head_dim": 64})
    with pytest.raises(
        SpecConfigError, match=r"(?s)cannot draft for this target.*64.*128|cannot draft for this target.*128.*64"
    ):
        built_in_method(spec, wide)
