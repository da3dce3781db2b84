"""TRL's adapter without TRL: the flag, what is refused, and what ``spec-plugin check trl`` reads of a run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spec_plugin_trl import check as check_module
from spec_plugin_trl import flag, options

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands.check import find_model
from spec_plugin.commands.forecast import judge
from spec_plugin.plan.run_plan import Model, RunPlan

ON = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": True}


@pytest.mark.parametrize(
    ("said", "on", "k"),
    [
        ("1", True, 8),
        ("k=5", True, 5),
        ("1 k=5 train_share=0.3", True, 5),
        ("0", False, None),
        ("Off k=5", False, None),
        ("", True, 8),
        ("  ", True, 8),
    ],
)
def test_the_variable_sets_options_and_turns_a_script_off_that_enables_it(
    said: str, on: bool, k: int | None, monkeypatch: Any
) -> None:
    monkeypatch.setenv(flag.FLAG, said)
    assert flag.choose() is on
    assert not on or flag.options().k == k
    assert on or os.environ[flag.FLAG] == said


def test_options_of_the_script_take_the_place_of_those_of_the_variable(monkeypatch: Any) -> None:
    from spec_plugin_trl import SpecArguments

    monkeypatch.setenv(flag.FLAG, "k=5 train_share=0.3")
    assert flag.choose(SpecArguments(spec_k="4", spec_block="pace,metrics", spec_draft="a folder/x"), {"k": 3})
    found = flag.options()
    assert (found.k, found.train_share, list(found.block)) == (3, 0.3, ["pace", "metrics"])
    assert found.draft == "a folder/x"
    for off in (False, "off", "false", "False", "0", "no"):
        assert not flag.choose(SpecArguments(spec=off)), off
    with pytest.raises(SpecConfigError, match="spec='maybe': expected on or off"):
        flag.choose(SpecArguments(spec="maybe"))
    with pytest.raises(SpecConfigError, match="k='99'"):
        flag.choose(given={"k": 99})
    with pytest.raises(SpecConfigError, match="unknown option"):
        flag.choose(given={"speed": 1})


def test_every_option_is_in_the_dataclass_for_trls_parser() -> None:
    from spec_plugin_trl import SpecArguments

    from spec_plugin.api.config import SpecConfig

    named = {field.name for field in dataclasses.fields(SpecArguments)}
    assert named == {"spec", *(f"spec_{name}" for name in SpecConfig.model_fields)}
    assert all(field.metadata["help"] for field in dataclasses.fields(SpecArguments))


def test_lists_are_split_none_is_none_and_quotes_keep_a_path_together(monkeypatch: Any) -> None:
    monkeypatch.setenv(flag.FLAG, "1 block=pace,metrics draft='a folder/x' train_tokens=none aux_layers=none")
    found = flag.options()
    assert list(found.block) == ["pace", "metrics"] and found.draft == "a folder/x" and found.train_tokens is None
    assert found.aux_layers is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("1 k=99", r"SPEC_PLUGIN_TRL: k='99'"),
        (
            "1 trainshare=0.3",
            r"unknown option SPEC_PLUGIN_TRL: trainshare='0.3'; did you mean SPEC_PLUGIN_TRL: train_share",
        ),
        ("1 draft='a", r"SPEC_PLUGIN_TRL=1 draft='a: no closing quotation"),
        ("yes please", r"SPEC_PLUGIN_TRL: 'please' is neither 1 nor 0 nor name=value"),
    ],
)
def test_a_wrong_option_is_named_with_the_variable(said: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(flag.FLAG, said)
    with pytest.raises(SpecConfigError, match=message):
        flag.options()


def reasons(**changes: Any) -> list[str]:
    fields = {**ON, **changes}
    return [o.reason for o in (*options.objections(fields.get), *options.truncated(fields.get))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_vllm": False}, "rollouts without vLLM"),
        ({"vllm_mode": "server"}, "vLLM's server mode"),
        ({"vllm_tensor_parallel_size": 2}, "engines over several ranks with TRL"),
        ({"vllm_tensor_parallel_size": "two"}, "engines over several ranks with TRL"),
        ({"vllm_structured_outputs_regex": "a+"}, "structured outputs"),
        ({"vllm_model_impl": "transformers"}, "models that are not vLLM's own"),
        ({"top_p": 0.9}, "truncated sampling whose log-probs enter the loss"),
        ({"top_k": 20}, "truncated sampling whose log-probs enter the loss"),
        (
            {"top_p": 0.9, "vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.5},
            "truncated sampling whose log-probs enter the loss",
        ),
        ({"generation_kwargs": {"top_p": 0.5}}, "truncated sampling whose log-probs enter the loss"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    assert reasons(**changes) == [reason]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 0, "top_p": 1.0, "min_p": None},
        {"top_k": -1},
        {"top_p": 0.9, "vllm_importance_sampling_correction": False},
        {"vllm_model_impl": "vllm"},
        {"vllm_mode": None},
        {"use_liger_kernel": True},
    ],
)
def test_what_is_supported_is_not(changes: dict[str, Any]) -> None:
    assert not reasons(**changes)


def test_what_a_version_of_trl_cannot_do_is_refused_of_that_version(monkeypatch: Any) -> None:
    liger = {"use_liger_kernel": True, "vllm_importance_sampling_correction": False}
    for version, sleeps, loss in (
        ("1.8.0", 1, 1),
        ("1.9.2", 1, 1),
        ("1.14.0", 0, 1),
        ("1.15.0", 0, 0),
        ("", 0, 0),
        ("2.0.0", 0, 0),
    ):
        monkeypatch.setattr(options, "trl_version", lambda version=version: version)
        assert len(reasons(vllm_enable_sleep_mode=True)) == sleeps and len(reasons(**liger)) == loss, version
        assert not reasons(use_liger_kernel=True, vllm_importance_sampling_correction=None), "RLOO has no correction"


def test_trl_recomputes_log_probs_before_the_loss_by_its_own_rule() -> None:
    def trainer(accumulate: int, steps: int, iterations: int, correction: bool | None) -> Any:
        args = SimpleNamespace(gradient_accumulation_steps=accumulate, steps_per_generation=steps)
        if correction is not None:
            args.vllm_importance_sampling_correction = correction
        return SimpleNamespace(args=args, num_iterations=iterations)

    assert options.recomputes(trainer(2, 2, 1, True)) and options.recomputes(trainer(2, 2, 1, None))
    assert not options.recomputes(trainer(2, 2, 1, False)) and not options.recomputes(trainer(4, 2, 1, False))
    assert options.recomputes(trainer(2, 2, 2, False)) and options.recomputes(trainer(1, 2, 1, False))


class Trainer:
    pass


def test_a_trainer_is_refused_before_it_reads_its_model(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv(flag.FLAG, "1")
    good = SimpleNamespace(**ON)
    options.refuse_before(Trainer, {"args": good, "model": object()})
    with pytest.raises(SpecConfigError, match=r"use_vllm=None.*set SPEC_PLUGIN_TRL=0"):
        options.refuse_before(Trainer, {})
    with pytest.raises(SpecConfigError, match=r"min_p"):
        options.refuse_before(Trainer, {"args": SimpleNamespace(**ON, min_p=0.1)})
    with pytest.raises(SpecConfigError, match=r"config.json of"):
        options.refuse_before(Trainer, {"args": good, "model": str(tmp_path / "none")})
    unsloth = type("UnslothGRPOTrainer", (Trainer,), {"__module__": "unsloth_compiled_cache.UnslothGRPOTrainer"})
    with pytest.raises(SpecConfigError, match="Unsloth"):
        options.refuse_before(unsloth, {"args": good})
    monkeypatch.setenv(flag.FLAG, "1 k=0")
    with pytest.raises(SpecConfigError, match="SPEC_PLUGIN_TRL: k="):
        options.refuse_before(Trainer, {"args": good})


def test_a_trainer_without_an_adapter_is_refused_where_it_generates_by_vllm() -> None:
    assert not list(options.of_other(Trainer, {"args": SimpleNamespace(use_vllm=False)}))
    for args in (SimpleNamespace(use_vllm=True), SimpleNamespace()):
        (found,) = options.of_other(Trainer, {"args": args})
        assert "does not support TRL's Trainer yet" in str(found) and "use GRPOTrainer or RLOOTrainer" in str(found)


# ---- check


def find(name: str) -> Model:
    config = {"model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 8, "hidden_size": 4}
    return Model(name, config if name == "policy" else None, "a folder" if name == "policy" else "not on this disk")


def checked(*words: str) -> RunPlan:
    return check_module.check(words, find)


@pytest.fixture(autouse=True)
def trl_is_here(monkeypatch: Any) -> None:
    monkeypatch.setattr(options, "trl_version", lambda: "1.16.0")


def test_trls_command_line_is_read_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "use_vllm: true\ntop_p: 0.9\nvllm_importance_sampling_correction: false\nmodel_name_or_path: other\n"
    )
    plan = checked(
        "trl", "grpo", "--config", str(file), "--model_name_or_path", "policy", "--gradient_accumulation_steps=4"
    )
    assert not plan.objections and not plan.unseen and plan.facts is not None
    facts = plan.facts
    assert facts.model.name == "policy" and facts.target.sampling["top_p"] == 0.9
    assert not facts.rollout_in_loss and facts.target.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1".encode("utf-16"), "cannot be read"),
        (b"[" * 20_000, "cannot be read"),
        (b"a: 2024-13-45", "month must be in 1..12"),
        (b"[1, 2]", "holds list, and no fields"),
        (b"", "holds NoneType, and no fields"),
        (None, "is a pipe: give a file"),
    ],
    ids=str,
)
def test_a_file_of_options_that_is_none_is_said_not_to_have_been_read(tmp_path: Path, content: Any, said: str) -> None:
    file = tmp_path / "run.yaml"
    os.mkfifo(file) if content is None else file.write_bytes(content)
    plan = checked(
        "trl", "grpo", "--config", str(file), "--model_name_or_path", "policy", "--use_vllm", "--beta={[]: 1}"
    )
    assert any(f"--config {file}" in line and said in line for line in plan.unseen), plan.unseen


def test_without_use_vllm_it_says_that_there_is_nothing_to_speed_up() -> None:
    (objection,) = checked("trl", "rloo", "--model_name_or_path", "policy").objections
    assert str(objection) == (
        "the rollouts are generated by transformers, and spec-plugin speeds up vLLM's (use_vllm=False): set it to True"
    )


def test_what_a_script_does_not_say_in_its_flags_is_not_seen_and_never_held_against_it() -> None:
    plan = checked(
        "SPEC_PLUGIN_TRL=k=5 block=pace", "accelerate", "launch", "none.py", "--spec.method", "ngram", "--top_p", "0.9"
    )
    assert plan.facts is not None and not plan.objections
    spec = plan.facts.spec
    assert (spec.k, spec.method, list(spec.block)) == (5, "ngram", ["pace"])
    assert plan.facts.target.truncated and not plan.facts.rollout_in_loss
    (unseen,) = plan.unseen
    assert "none.py" in unseen and "--spec.dry_run" in unseen
    (objection,) = checked("accelerate", "launch", "none.py", "--vllm_mode", "server").objections
    assert objection.option == "vllm_mode", "what its flags do say is"


def test_of_rloo_no_log_prob_of_the_engines_enters_the_loss() -> None:
    words = ("--use_vllm", "--model_name_or_path", "policy", "--top_p", "0.9")
    plan = checked("trl", "rloo", *words)
    assert not plan.objections and plan.facts is not None and not plan.facts.rollout_in_loss
    assert checked("trl", "grpo", *words).facts.rollout_in_loss  # type: ignore[union-attr]
    assert checked("-m", "trl.scripts.grpo", *words).facts.rollout_in_loss  # type: ignore[union-attr]


def test_a_wrong_option_and_an_unreadable_model_are_objections(tmp_path: Path) -> None:
    plan = checked("SPEC_PLUGIN_TRL=k=99", "trl", "grpo", "--use_vllm", "--model_name_or_path", "policy")
    assert [o.reason for o in plan.objections] == ["a spec option"]
    (tmp_path / "config.json").write_text("{")
    plan = check_module.check(("trl", "grpo", "--use_vllm", "--model_name_or_path", str(tmp_path)), find_model)
    assert [o.reason for o in judge(plan).objections] == ["an unreadable model"]


def test_the_cpu_run_has_the_launcher_only_with_the_flag(tmp_path: Path) -> None:
    from spec_plugin_trl_cpu.run import TrlCpuRun, step_record

    files = (tmp_path / "policy", tmp_path / "data", tmp_path / "reward", tmp_path / "out")
    run = TrlCpuRun(*files, 3, overrides=("spec.k=5", "beta=0.1"), max_num_seqs=8, settings={"bf16": False})
    on = run.launch({"SPEC_PLUGIN_TRL": "0"})
    assert on.command[1:3] == ("-m", "spec_plugin_trl") and on.env["SPEC_PLUGIN_TRL"] == "k=5"
    assert on.env["SPEC_PLUGIN_CPU_MAX_NUM_SEQS"] == "8"
    assert on.command[-3:] == ("--set", "bf16=false", "beta=0.1")
    off = TrlCpuRun(*files, 3, plain=True).launch({"SPEC_PLUGIN_TRL": "1"})
    assert "spec_plugin_trl" not in off.command
    line = json.dumps({"step": 2, "loss": 0.5, "note": "x"})
    assert step_record(line) == (2, {"loss": 0.5})
