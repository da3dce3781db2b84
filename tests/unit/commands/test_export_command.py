"""``spec-plugin export`` as somebody types it: what it writes, and what it refuses in one sentence and with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders.bad_input import TARGET, draft_in, written
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from draft_training import load_draft
from spec_plugin.commands.export import export


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(export, [str(argument) for argument in arguments])


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return draft_in(tmp_path / "draft")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = written(tmp_path / "target", TARGET)
    save_file({"lm_head.weight": torch.ones(TARGET["vocab_size"], TARGET["hidden_size"])}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_a_draft_is_written_and_said(tmp_path: Path, draft: Path, target: Path, layout: str) -> None:
    out = tmp_path / "new" / "out"
    done = typed(draft, "--to", layout, "--out", out, "--target", target)
    assert done.exit_code == 0 and f"a draft for {layout}" in done.stdout and str(out) in done.stdout
    assert load_draft(out)[0] == load_draft(draft)[0]


def test_speculators_learns_the_target_and_how_many_tokens_to_draft(tmp_path: Path, draft: Path, target: Path) -> None:
    assert typed(draft, "--to", "speculators", "--out", tmp_path / "out", "--target", target, "--k", 7).exit_code == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert said["verifier"]["name_or_path"] == str(target) and said["proposal_methods"][0]["speculative_tokens"] == 7


def test_a_speculators_draft_becomes_the_vllm_draft_that_it_was(tmp_path: Path, draft: Path, target: Path) -> None:
    typed(draft, "--to", "speculators", "--out", tmp_path / "theirs", "--target", target)
    typed(draft, "--to", "vllm", "--out", tmp_path / "first")
    assert typed(tmp_path / "theirs", "--to", "vllm", "--out", tmp_path / "second").exit_code == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_auxiliary_layers_that_the_draft_does_not_name_are_those_of_its_target(tmp_path: Path, target: Path) -> None:
    draft = draft_in(tmp_path / "draft", {"eagle_aux_hidden_state_layer_ids": None})
    refused = typed(draft, "--to", "sglang", "--out", tmp_path / "out")
    assert refused.exit_code == 2 and "names no eagle_aux_hidden_state_layer_ids" in refused.stderr
    assert typed(draft, "--to", "sglang", "--out", tmp_path / "out", "--target", target).exit_code == 0


def refusals(tmp_path: Path, draft: Path, target: Path) -> dict[str, tuple[list[object], str]]:
    (tmp_path / "there").mkdir()
    small = written(tmp_path / "small", {"architectures": ["Qwen3ForCausalLM"]})
    torn = draft_in(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    other = written(tmp_path / "other", {**TARGET, "hidden_size": TARGET["hidden_size"] * 2})
    bare = written(tmp_path / "bare", TARGET)
    out, new = "--out", tmp_path / "new"
    return {
        "an unknown layout": ([draft, "--to", "tensorrt", out, new], "'tensorrt' is not one of 'vllm', 'sglang'"),
        "no folder": ([tmp_path / "nowhere", "--to", "vllm", out, new], "nowhere does not exist"),
        "a file": ([draft / "config.json", "--to", "vllm", out, new], "config.json is no folder"),
        "no draft": ([target, "--to", "vllm", out, new], "only EAGLE-3 drafts"),
        "a small model": ([small, "--to", "sglang", out, new], "Qwen3ForCausalLM"),
        "torn weights": ([torn, "--to", "vllm", out, new], "model.safetensors cannot be read"),
        "a folder that exists": ([draft, "--to", "vllm", out, tmp_path / "there"], "there exists"),
        "a target without weights": (
            [draft, "--to", "speculators", out, new, "--target", bare],
            "no LM head or embedding",
        ),
        "no target": ([draft, "--to", "speculators", out, new], "needs --target"),
        "an unknown target": ([draft, "--to", "vllm", out, new, "--target", "no/such-model"], "--target no/such-model"),
        "another target": ([draft, "--to", "vllm", out, new, "--target", other], "made for another target"),
        "a place below a file": ([draft, "--to", "vllm", out, draft / "config.json" / "out"], "config.json"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "an unknown layout",
        "no folder",
        "a file",
        "no draft",
        "a small model",
        "torn weights",
        "a folder that exists",
        "a target without weights",
        "no target",
        "an unknown target",
        "another target",
        "a place below a file",
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(tmp_path: Path, draft: Path, target: Path, case: str) -> None:
    cases = refusals(tmp_path, draft, target)
    arguments, said = cases[case]
    before = sorted(tmp_path.rglob("*"))
    refused = typed(*arguments)
    assert refused.exit_code == 2 and said in refused.stderr and "Traceback" not in refused.output
    assert sum(line.startswith("Error:") for line in refused.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before and not refused.stdout


def test_the_help_says_who_loads_what(draft: Path) -> None:
    said = typed("--help").stdout
    for word in (
        "eagle3",
        "--speculative-draft-model-path",
        "SpeculatorModel.from_pretrained",
        "Exit code: 0 written, 2 refused",
    ):
        assert word in said
