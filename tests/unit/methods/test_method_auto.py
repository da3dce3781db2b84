"""The choice of a method at start: what the target brings, what can learn, what needs nothing; and why, in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draft_training.layers import initialise
from draft_training.mtp import MtpShape
from draft_training.mtp_module import MtpKind
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.api.rollouts import Rollout
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession, method_of
from spec_plugin.methods import suffix

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
MIMO = {**QWEN, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
UNKNOWN = {**QWEN, "architectures": ["OtherForCausalLM"], "model_type": "other"}


def chosen(hf: dict[str, Any], path: Path = Path("m"), **options: Any) -> Method:
    config, target = (
        SpecConfig.parse({"method": "auto", **options}),
        TargetInfo(str(path), hf, "float32", max_num_seqs=8),
    )
    return method_of(config, target, create_manager((), (), load_entry_points=False))


def with_layer(folder: Path) -> Path:
    layer = MtpKind(MtpShape.from_target(MIMO)).build("cpu", torch.float32)
    initialise(layer, torch.Generator().manual_seed(0))
    named = {f"model.mtp_layers.0.{n}": p.detach() for n, p in layer.named_parameters()}
    save_file({"model.norm.weight": torch.ones(64), **named}, folder / "model.safetensors")
    return folder


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    def is_there(there: bool) -> None:
        monkeypatch.setattr(suffix.importlib.util, "find_spec", lambda name: object() if there else None)

    return is_there


def test_a_layer_that_the_target_brings_comes_first(tmp_path: Path) -> None:
    found = chosen(MIMO, with_layer(tmp_path))
    assert (
        found.name == "mtp"
        and found.pretrained
        and found.why == "the target brings a layer for it, which knows something at once"
    )


@pytest.mark.parametrize("hf", [QWEN, MIMO])
def test_otherwise_a_draft_learns(hf: dict[str, Any], tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    found = chosen(hf, tmp_path)
    assert found.name == "eagle3" and found.newborn
    assert "mtp cannot: spec.method='mtp'" in found.why


@pytest.mark.parametrize(("there", "name"), [(True, "suffix"), (False, "ngram")])
def test_what_cannot_learn_is_looked_up(package: Any, there: bool, name: str) -> None:
    package(there)
    for options in ({}, {"train": False}):
        hf = UNKNOWN if options == {} else QWEN
        found = chosen(hf, **options)
        assert found.name == name and found.pretrained and found.harvest is None
        assert found.why.startswith("nothing to train")


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "MiniCPMO", "HYV3ForCausalLM"])
def test_a_target_that_no_draft_can_read_is_drafted_for_by_look_up(package: Any, architecture: str) -> None:
    package(False)
    found = chosen({**QWEN, "architectures": [architecture], "model_type": "any"})
    assert found.name == "ngram" and f"eagle3 cannot: vLLM's class {architecture}" in found.why


def test_a_draft_that_was_given_is_taken_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = chosen(QWEN, draft=str(tmp_path), train=False)
    assert found.name == "frozen" and found.why == "spec.draft is of the kind dflash"
    with pytest.raises(SpecConfigError):
        chosen(QWEN, draft=str(tmp_path))


def test_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    target = TargetInfo("m", QWEN, "float32", max_num_seqs=8)
    SpecSession(SpecConfig.parse({"method": "auto"}), target, create_manager((), (), load_entry_points=False))
    assert caplog.text.count("spec.method=auto is eagle3: a draft that learns along the run") == 1


def test_a_chosen_method_that_remembers_is_the_one_that_is_registered(package: Any, tmp_path: Path) -> None:
    package(True)
    config, target = SpecConfig.parse({"method": "auto", "train": False}), TargetInfo("m", QWEN, "float32")
    session = SpecSession(config, target, create_manager((), (), load_entry_points=False))
    memory = session.method.memory
    assert memory is session.manager.get_plugin("suffix")
    assert memory.recall() == []
    memory.keep([Rollout(bytes(4), bytes(8))])
    assert memory.recall() == [Rollout(bytes(4), bytes(8))]
    session.save(tmp_path)
    assert list(tmp_path.rglob("rollouts.safetensors"))


def test_a_method_that_remembers_does_so_where_its_plugin_is_blocked_and_auto_takes_it(package: Any) -> None:
    package(True)
    config = SpecConfig.parse({"method": "auto", "train": False, "block": ["suffix"]})
    session = SpecSession(
        config, TargetInfo("m", QWEN, "float32"), create_manager(("suffix",), (), load_entry_points=False)
    )
    assert session.method.name == "suffix" and session.method.memory.recall() == []
