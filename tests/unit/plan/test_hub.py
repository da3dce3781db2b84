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
from click.testing import CliRunner
from huggingface_hub import constants, errors

from draft_training import DraftTrainer, TrainSettings
from draft_training.config import DraftConfig
from draft_training.eagle3 import save_draft
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.lifecycle.manager import built_in_method
from spec_plugin.plan.hub import DraftNotHereError, draft_folder, known_draft

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
        assert draft_folder(draft, TARGET, fetch=True) == draft
    for draft in ("/no/such/folder", "./no/such", "a/b/c", "draft"):
        assert draft_folder(draft, TARGET, fetch=True) == draft, "its reader says that it is not there"


def test_a_draft_of_the_hub_is_taken_from_its_cache_at_the_revision_that_is_asked_for(hub):
    main, other = cached(hub, "owner/name", "main", "v2", model__safetensors=b"")
    assert draft_folder("owner/name", TARGET, fetch=True) == str(main)
    assert draft_folder("owner/name@v2", TARGET, fetch=True) == str(other)
    assert draft_folder(f"owner/name@{other.name}", TARGET, fetch=False) == str(other)


def test_law_8_what_the_configs_of_a_draft_name_as_code_is_left_out_and_the_draft_is_taken(hub):
    """As what speculators writes: ``auto_map`` names a class of its own, beside which the hub has the file."""
    (folder,) = cached(hub, "owner/name", "main", model__safetensors=b"1", notes__json=b"[]")
    blob = folder.parents[1] / "blobs" / "1"
    blob.parent.mkdir()
    blob.write_text(
        json.dumps({"auto_map": {"": "eagle3.Config"}, "hidden_size": 64, "text": {"auto_map": {"AutoModel": "x.Y"}}})
    )
    (folder / "config.json").symlink_to("../../blobs/1")
    found = Path(draft_folder("owner/name", TARGET, fetch=True))
    assert found != folder and json.loads((found / "config.json").read_text()) == {"hidden_size": 64, "text": {}}
    assert (found / "model.safetensors").read_bytes() == b"1" and (found / "notes.json").is_file()
    assert draft_folder("owner/name", TARGET, fetch=False) == str(found), "one copy for a process"
    assert "auto_map" in blob.read_text(), "the hub's cache is as it was"


def test_a_home_folder_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "draft").mkdir()
    assert draft_folder("~/draft", TARGET, fetch=True) == str(tmp_path / "draft")
    with pytest.raises(SpecConfigError, match="is no path"):
        draft_folder("~nobody-of-this-name/draft", TARGET, fetch=True)


def test_what_is_not_here_is_fetched_by_a_run_alone(hub):
    with pytest.raises(DraftNotHereError, match="owner/name is not in this machine's cache: the run fetches it"):
        draft_folder("owner/name", TARGET, fetch=False)
    with pytest.raises(
        SpecConfigError, match=r"could it be fetched .*: run `hf download owner/name` where there is a network"
    ):
        draft_folder("owner/name", TARGET, fetch=True)
    cached(hub, "owner/name", "main", config__json=b"{}")
    with pytest.raises(DraftNotHereError, match="is in this machine's cache only in part"):
        draft_folder("owner/name", TARGET, fetch=False)
    with pytest.raises(SpecConfigError, match=r"has no \*\.safetensors: weights in other formats are not loaded"):
        draft_folder("owner/name", TARGET, fetch=True)


def test_nothing_but_configs_safetensors_and_a_masks_vector_is_asked_of_the_hub(monkeypatch, tmp_path):
    asked: dict[str, Any] = {}
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *names, **options: asked.update(options) or str(tmp_path)
    )
    draft_folder("owner/name@main", TARGET, fetch=True)
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
        draft_folder("owner/name@v9", TARGET, fetch=True)


def test_a_draft_of_the_hub_starts_a_run_and_one_of_another_size_is_refused_with_both_numbers(hub):
    (folder,) = cached(hub, "owner/name", "main")
    config = DraftConfig.from_target(HF)
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=0)
    folder.rmdir()
    save_draft(folder, config, trainer.engine_tensors(torch.float32))
    spec = SpecConfig.parse({"draft": "owner/name"})
    method = built_in_method(spec, TARGET)
    assert method is not None and method.name == "eagle3" and method.ready and method.draft is not None
    wide = replace(TARGET, hf_config=HF | {"hidden_size": 128, "head_dim": 64})
    with pytest.raises(
        SpecConfigError, match=r"(?s)cannot draft for this target.*64.*128|cannot draft for this target.*128.*64"
    ):
        built_in_method(spec, wide)


@pytest.mark.parametrize(
    ("path", "config", "draft", "same_name"),
    [
        ("Qwen/Qwen3-8B", QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.eagle3", True),
        ("/models/qwen3-8b", QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.eagle3", True),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/1", QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.eagle3", True),
        ("/models/my-own", QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.eagle3", False),
        ("meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B, "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", True),
        ("Qwen/Qwen3-8B", QWEN3_8B | {"num_hidden_layers": 4}, None, False),
        ("Qwen/Qwen3-8B", {}, None, False),
    ],
)
def test_the_draft_that_is_known_for_a_policy(path, config, draft, same_name):
    found = known_draft(policy(path, config))
    assert (None if found is None else (found.draft, found.same_name)) == (
        None if draft is None else (draft, same_name)
    )
    if found is not None:
        assert f"spec.draft={draft}" in found.sentence and found.as_of in found.sentence


def test_a_known_draft_is_taken_if_the_user_asks_for_it(hub):
    (folder,) = cached(hub, "RedHatAI/Qwen3-8B-speculator.eagle3", "main", model__safetensors=b"")
    assert draft_folder("known", policy("Qwen/Qwen3-8B", QWEN3_8B), fetch=True) == str(folder)
    with pytest.raises(SpecConfigError, match=r"no public draft is known for the policy m \(table of .*Qwen/Qwen3-8B"):
        draft_folder("known", TARGET, fetch=True)


@pytest.mark.parametrize(
    ("name", "config", "draft"),
    [
        ("Qwen/Qwen3-8B", QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B, "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"),
    ],
)
def test_check_names_a_known_draft_and_says_what_it_could_not_look_at(tmp_path, name, config, draft):
    from spec_plugin.commands.cli import main

    file = tmp_path / "config.json"
    more = {
        "architectures": ["Qwen3ForCausalLM" if "Qwen" in name else "LlamaForCausalLM"],
        "max_position_embeddings": 40960,
    }
    heads = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "head_dim": 128,
        "rope_theta": 1e6,
    }
    file.write_text(json.dumps(config | more | heads))
    arguments = ["check", "verl", "--model-config", str(file), "--", f"actor_rollout_ref.model.path={name}"]
    spec = "actor_rollout_ref.rollout.custom.spec"
    found = CliRunner().invoke(main, [*arguments, f"+{spec}.k=3"])
    assert f"spec.draft={draft}" in " ".join(found.output.split()), found.output
    found = CliRunner().invoke(main, [*arguments, f"+{spec}.draft=known"])
    assert f"{draft} is not in this machine's cache: the run fetches it" in " ".join(found.output.split()), found.output
