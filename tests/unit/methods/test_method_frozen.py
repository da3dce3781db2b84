"""Drafts that are served as they are: which kinds are told apart, and what each of them asks of the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.frozen import DRAFTS, HF, config_of, tensors_of
from safetensors.torch import save_file

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import RolloutStats, SelfTestReport, StepTiming, TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.engine.lossless import check_speculative_config
from spec_plugin.lifecycle.manager import create_manager, method_of
from spec_plugin.plan import model_runner
from spec_plugin.policy.break_even.controller import BreakEvenController


def draft(folder: Path, kind: str, layers: int = 1, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**config_of(kind, layers), **changes}))
    save_file(tensors_of(kind, layers), folder / "model.safetensors")
    return str(folder)


def method(folder: str, load_format: str = "auto", **options: Any) -> Method:
    config = SpecConfig.parse({"draft": folder, "train": False, "k": 4, **options})
    target = TargetInfo("m", HF, "float32", max_num_seqs=8, load_format=load_format)
    return method_of(config, target, create_manager((), (), load_entry_points=False))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", DRAFTS)
def test_vllm_is_told_what_kind_it_is(tmp_path: Path, kind: str, named: bool) -> None:
    found = method(draft(tmp_path, kind), **({"method": "frozen"} if named else {}))
    told = found.speculative_config()
    check_speculative_config(told)
    assert told["method"] == ("eagle3" if kind == "parallel" else kind) and told["model"] == str(tmp_path)
    assert bool(told.get("parallel_drafting")) == found.all_or_nothing_k == (kind == "parallel")
    assert {k for _, _, k in told["num_speculative_tokens_per_batch_size"]} == (
        {4} if found.all_or_nothing_k else {0, 1, 2, 3, 4}
    )
    assert found.pretrained and found.harvest is None and found.draft is None


def test_layers_may_be_called_none_or_be_several(tmp_path: Path) -> None:
    """Some publish an EAGLE-3 layer under 0 layers."""
    for layers, told in ((1, 0), (2, 2)):
        folder = draft(tmp_path, "eagle3", layers, num_hidden_layers=told)
        assert method(folder, method="frozen").speculative_config()["method"] == "eagle3"


#: ways in which a draft's file is not what vLLM needs, and what is said
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "int8": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight in .* is I8: expected F32"),
    "bool": (lambda t: t.update({"norm.weight": t["norm.weight"].bool()}), "norm.weight in .* is BOOL"),
    "missing": (lambda t: t.pop("midlayer.self_attn.k_proj.weight"), "lacks midlayer.self_attn.k_proj.weight"),
    "no norm": (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
    "transposed": (
        lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.zeros(64, 128)}),
        r"\[64, 128\], but .*\[128, 64\]",
    ),
    "four states": (lambda t: t.update({"fc.weight": torch.zeros(64, 256)}), r"\[64, 256\], but .*\[64, 192\]"),
    "short map": (
        lambda t: t.update({"d2t": torch.zeros(8, dtype=torch.int64)}),
        "8 tokens, but .*draft_vocab_size=16",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_draft_is_refused_before_an_engine_starts(tmp_path: Path, how: str) -> None:
    """vLLM leaves a tensor that is missing as it was in memory, and takes numbers of any kind."""
    damage, said = DAMAGE[how]
    folder = draft(tmp_path, "eagle3", draft_vocab_size=16)
    tensors = tensors_of("eagle3")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SpecConfigError, match=said):
        method(folder, method="frozen")


def test_a_quantized_draft_is_vllms_to_read(tmp_path: Path) -> None:
    folder = draft(tmp_path, "eagle3", quantization_config={"quant_method": "compressed-tensors"})
    save_file({name: t.to(torch.int8) for name, t in tensors_of("eagle3").items()}, tmp_path / "model.safetensors")
    assert method(folder, method="frozen").name == "frozen"


def test_an_index_of_files_that_are_not_there_is_refused(tmp_path: Path) -> None:
    folder = draft(tmp_path, "eagle3")
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    homes = {name: "model-00001-of-00002.safetensors" for name in tensors_of("eagle3")}
    index = {"weight_map": {**homes, "fc.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecConfigError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        method(folder, method="frozen")


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, ("/nonexistent",)


@pytest.mark.parametrize("vector", [torch.ones(64), {"embedding": torch.ones(1, 64), "mask_token_id": 3}])
def test_a_masks_vector_beside_a_draft_is_left_to_vllm(tmp_path: Path, vector: Any) -> None:
    folder = draft(tmp_path, "dflash")
    torch.save(vector, tmp_path / "mask_embedding.pt")
    assert method(folder).model() == folder


def test_what_is_no_file_is_left_alone_as_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = draft(tmp_path, "dflash")
    os.mkfifo(tmp_path / "mask_embedding.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it would wait for ever"))
    assert method(folder).model() == folder


@pytest.mark.parametrize("vector", [torch.full((64,), torch.nan), {"other": torch.ones(64)}, Code(), "torn"])
def test_law_8_a_masks_vector_that_is_none_is_refused_before_the_engine_starts(tmp_path: Path, vector: Any) -> None:
    folder = draft(tmp_path, "dflash")
    torch.save(vector, tmp_path / "mask_embedding.pt")
    if vector == "torn":
        (tmp_path / "mask_embedding.pt").write_bytes(b"PK")
    with pytest.raises(SpecConfigError, match=r"mask_embedding\.pt"):
        method(folder).model()


def test_a_whole_model_is_not_made_noise_of(tmp_path: Path) -> None:
    with pytest.raises(SpecConfigError, match=r"load_format to auto, or spec\.method=draft_model"):
        method(draft(tmp_path, "draft_model"), load_format="dummy")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
def test_a_draft_whose_file_v2_would_leave_unread_is_refused(tmp_path: Path, kind: str, monkeypatch) -> None:
    """Nothing ever sends it: it would be noise to the end of the run. V1 reads it."""
    folder = draft(tmp_path, kind)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert method(folder, load_format="dummy").speculative_config()["draft_load_config"] == {"load_format": "auto"}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    if model_runner.loads_drafts_like_targets("dflash" if kind == "dflash" else "eagle3"):  # this vLLM
        with pytest.raises(SpecConfigError, match=r"leaves the draft's file unread.*load_format to auto"):
            method(folder, load_format="dummy")
    assert method(folder).pretrained


def test_what_is_trained_is_not_frozen(tmp_path: Path) -> None:
    with pytest.raises(SpecConfigError, match=r"spec\.train=false"):
        method(draft(tmp_path, "eagle"), method="frozen", train=True)
    with pytest.raises(SpecConfigError, match="only LlamaForCausalLMEagle3 drafts can be trained"):
        method(draft(tmp_path, "eagle"), train=True)


@pytest.mark.parametrize("broken", ["nothing", "config", "tensors", "unknown"])
def test_what_is_no_draft_is_said_to_be_none(tmp_path: Path, broken: str) -> None:
    draft(tmp_path, "eagle")
    if broken == "nothing":
        (tmp_path / "config.json").unlink()
    elif broken == "config":
        (tmp_path / "config.json").write_text("{")
    elif broken == "tensors":
        (tmp_path / "model.safetensors").write_text("{")
    else:
        save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecConfigError, match="is no draft that is known" if broken == "unknown" else "cannot be read"):
        method(str(tmp_path))


def test_a_draft_of_all_tokens_or_none_is_tried_with_all() -> None:
    controller = BreakEvenController()
    target = TargetInfo("m", HF, "float32", max_num_seqs=8)
    controller.spec_configure(
        SpecConfig.parse({"k": 5}), target, Method("frozen", {}, pretrained=True, all_or_nothing_k=True)
    )
    steps = [StepTiming(b, k, k == 0, t, 100) for b in (1, 4, 8) for k, t in ((0, 0.010), (5, 0.012))]
    controller.spec_engine_ready(SelfTestReport((), 1.0, tuple(steps)))
    assert controller.spec_schedule(0).table == (0,) + (5,) * 8
    stats = RolloutStats(0, 8, 800, 1.0, 1300, 6500, 3900, (1200, 1000, 800, 500, 400), tuple(steps))
    controller.spec_rollout_end(stats)
    assert set(controller.spec_schedule(1).table) == {0, 5}
