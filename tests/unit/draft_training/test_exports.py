"""A draft written for vLLM, SGLang and speculators: the same numbers, under the names and counts of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.drafts import TINY, make_trainer
from safetensors.torch import load_file, save_file

from draft_training import DraftConfig, DraftConfigError, load_draft
from draft_training.exports import Verifier, for_sglang, for_speculators, for_vllm, target_head, write_export

QWEN = Verifier("Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])


def layouts(config: DraftConfig) -> dict[str, dict[str, Any]]:
    return {
        "vllm": for_vllm(config),
        "sglang": for_sglang(config),
        "speculators": for_speculators(config, QWEN, 5),
    }


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
@pytest.mark.parametrize("vocabulary", [None, 12])
def test_what_was_exported_is_read_back_as_the_same_draft(tmp_path: Path, layout: str, vocabulary: int | None) -> None:
    config = DraftConfig.from_target(TINY, draft_vocab_size=vocabulary)
    tensors = make_trainer(config).engine_tensors()
    write_export(tmp_path / "out", config, layouts(config)[layout], tensors)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    again, found = load_draft(tmp_path / "out")
    assert again == config and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_vllms_layout_is_that_of_a_run(tmp_path: Path, tiny: DraftConfig) -> None:
    assert for_vllm(tiny) == tiny.to_hf()


def test_sglang_counts_layers_by_their_output_and_shares_the_head_only_of_a_vocabulary_that_is_null(
    tiny: DraftConfig, pruned: DraftConfig
) -> None:
    assert tiny.aux_layers == (2, 4, 5)
    made = for_sglang(tiny)
    assert made["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert made["draft_vocab_size"] is None and for_sglang(pruned)["draft_vocab_size"] == 12
    assert made["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5], "vLLM reads this one, and so do we"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"aux_layers": (0, 3, 5)}, r"enters layers \[0, 3, 5\]"),
    ],
)
def test_what_sglang_would_compute_differently_is_refused(tiny: DraftConfig, changed: Any, said: str) -> None:
    with pytest.raises(DraftConfigError, match=said):
        for_sglang(replace(tiny, **changed))


def test_speculators_layout_tells_the_layer_from_the_draft_and_names_the_target(
    tmp_path: Path, pruned: DraftConfig
) -> None:
    made = for_speculators(pruned, QWEN, 5)
    assert made["speculators_config"]["verifier"] == {
        "name_or_path": "Qwen/Qwen3-8B",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert made["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    layer = made["transformer_layer_config"]
    assert layer["vocab_size"] == 40 and made["draft_vocab_size"] == 12 and "draft_vocab_size" not in layer
    assert layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1
    assert made["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and made["norm_output"] is True
    write_export(tmp_path / "out", pruned, made, make_trainer(pruned).engine_tensors())
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "layers.0.self_attn.q_proj.weight" in names and not [n for n in names if "midlayer" in n]
    assert {"lm_head.weight", "d2t", "t2d"} <= names


def test_tensors_of_another_draft_leave_nothing_behind(tmp_path: Path, tiny: DraftConfig, pruned: DraftConfig) -> None:
    with pytest.raises(DraftConfigError, match=r"lm_head\.weight"):
        write_export(tmp_path / "out", pruned, for_vllm(pruned), make_trainer(tiny).engine_tensors())
    assert [*tmp_path.iterdir()] == []


def test_the_dtype_of_the_numbers_is_said(tmp_path: Path, tiny: DraftConfig) -> None:
    tensors = {name: t.to(torch.bfloat16) for name, t in make_trainer(tiny).engine_tensors().items()}
    write_export(tmp_path / "out", tiny, for_vllm(tiny), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("names", [("model.embed_tokens.weight", "lm_head.weight"), ("model.embed_tokens.weight",)])
def test_the_targets_head_is_its_own_or_else_its_embedding(
    tmp_path: Path, tiny: DraftConfig, names: tuple[str, ...]
) -> None:
    for number, name in enumerate(names):
        save_file({name: torch.full((40, 16), float(number))}, tmp_path / f"model-{number}.safetensors")
    assert target_head(tmp_path, tiny).unique().tolist() == [len(names) - 1]


def test_a_folder_without_the_targets_head_is_refused(tmp_path: Path, tiny: DraftConfig) -> None:
    save_file({"lm_head.weight": torch.zeros(41, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(DraftConfigError, match=r"no LM head or embedding of \[40, 16\]"):
        target_head(tmp_path, tiny)


def test_a_head_beside_the_draft_has_its_dtype_and_is_not_read_back(tmp_path: Path, tiny: DraftConfig) -> None:
    tensors = {name: t.to(torch.bfloat16) for name, t in make_trainer(tiny).engine_tensors().items()}
    write_export(tmp_path / "out", tiny, for_speculators(tiny, QWEN, 5), tensors, torch.ones(40, 16))
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert load_draft(tmp_path / "out")[1].keys() == tensors.keys()
