"""``spec-plugin check trl``: fields that TRL does not have, and what of a script is certain without running it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spec_plugin_trl import fields, options
from spec_plugin_trl.check import check

from spec_plugin.commands.check import find_model, model_from
from spec_plugin.plan.run_plan import Model, RunPlan

SOURCES = {
    (
        "trl",
        "trainer/grpo_config.py",
    ): "class GRPOConfig(_BaseConfig):\n    max_completion_length: int = 256\n    use_vllm: bool = False\n",
    ("transformers", "training_args.py"): "class TrainingArguments:\n    output_dir: str\n    bf16: bool = False\n",
    ("trl", "trainer/model_config.py"): "class ModelConfig:\n    model_name_or_path: str\n",
    ("accelerate", "commands/launch.py"): 'parser.add_argument("--num_processes", type=int)',
}
SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
NAME = "someone/policy"
config = GRPOConfig({config})
GRPOTrainer(model={model}, args=config)
"""


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "source_of", lambda *file: SOURCES.get(file, ""))
    monkeypatch.setattr(options, "trl_version", lambda: "1.16.0")


def checked(*words: str) -> RunPlan:
    return check(words, lambda name: Model(name, None, "not here"))


def of(tmp_path: Path, config: str = "use_vllm=True", model: str = "NAME", more: str = "") -> RunPlan:
    (tmp_path / "train.py").write_text(SCRIPT.format(config=config, model=model) + more)
    return checked("python", str(tmp_path / "train.py"))


def test_a_field_that_trl_does_not_have_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (objection,) = of(tmp_path, "use_vllm=True, max_completion_len=512").objections
    assert "it has no field max_completion_len" in str(objection) and "did you mean max_completion_length?" in str(
        objection
    )
    recipe = ("trl", "grpo", "--use_vllm", "--model_name_or_path", "policy", "--num_processes", "2", "--no_bf16")
    assert not checked(*recipe).objections
    (objection,) = checked(*recipe, "--max_completion_len", "512").objections
    assert "it has no flag max_completion_len" in str(objection) and objection.by == "trl"


@pytest.mark.parametrize("config", ["**given", "use_vllm=True, bf16=True, **given"])
def test_what_a_script_may_give_besides_is_unknown_and_not_false(tmp_path: Path, config: str) -> None:
    plan = of(tmp_path, config, more="config.use_vllm = True\n")
    assert not plan.objections and any("--spec.dry_run" in line for line in plan.unseen)


def test_of_what_is_no_trl_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from mine import GRPOConfig\nGRPOConfig(anything=1)\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    for name in ("own.py", "broken.py", "nowhere.py"):
        assert not checked("python", str(tmp_path / name)).objections


@pytest.mark.parametrize(
    ("model", "more", "name"),
    [
        ("NAME", "", "someone/policy"),
        ("'other/policy'", "", "other/policy"),
        ("NAME", "for NAME in ('a', 'b'): pass\n", ""),
        ("NAME", "NAME = 'changed/since'\n", ""),
        ("load()", "", ""),
        ("NAME", "GRPOTrainer('second/policy', args=config)\n", ""),
    ],
)
def test_a_model_that_is_a_constant_is_followed_and_one_that_may_change_is_not(
    tmp_path: Path, model: str, more: str, name: str
) -> None:
    facts = of(tmp_path, model=model, more=more).facts
    assert facts is not None and facts.model.name == name


def test_a_models_config_stands_in_for_one_that_was_not_seen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    (tmp_path / "train.py").write_text(SCRIPT.format(config="use_vllm=True", model="load()"))
    plan = check(("python", str(tmp_path / "train.py")), model_from(tmp_path / "config.json"))
    assert plan.facts is not None and plan.facts.target.hf_config["hidden_size"] == 64
    assert find_model("").config is None


def test_a_dry_run_that_dies_of_such_a_field_is_a_refusal() -> None:
    said = "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_completion_len'"
    (objection,) = fields.unexpected(said)
    assert "did you mean max_completion_length?" in str(objection)
    assert not [*fields.unexpected("TypeError: Mine.__init__() got an unexpected keyword argument 'x'")]
