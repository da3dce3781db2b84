"""``spec-plugin check``: what it accepts, what it refuses and with which words, for both trainers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import spec_plugin_openrlhf.check as openrlhf
import spec_plugin_openrlhf.options as openrlhf_options
import torch
from builders.check_command import PATH, QWEN3, ROLLOUT, VLLM, a_qwen3, needs_verl
from click.testing import CliRunner, Result
from spec_plugin_conformance.targets import tiny_targets
from spec_plugin_verl_check.check import check as verl_check

from draft_training import DraftConfig, DraftTrainer, Eagle3Draft, TrainSettings, save_draft
from draft_training.mtp import MtpShape
from spec_plugin import SpecConfigError
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.commands import forecast
from spec_plugin.commands.check import find_check, find_model, judge_run
from spec_plugin.commands.cli import main
from spec_plugin.methods.fit import refuse_unfit
from spec_plugin.plan import sources
from spec_plugin.plan.model_runner import Cluster
from spec_plugin.plan.refusals import refuse
from spec_plugin.plan.run_plan import Model, RunFacts, split_launch

openrlhf_check = partial(judge_run, "openrlhf")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


# OpenRLHF

GOOD = ("--actor.model_name_or_path", "Qwen/Qwen3-8B", "--vllm.num_engines", "2")


@pytest.fixture
def flags_of_openrlhf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parser = openrlhf_options._parser()
    names = [name for action in parser._actions for name in action.option_strings]
    monkeypatch.setattr(openrlhf, "known_flags", lambda: (*names, "--train.agent_func_path", "--ds.enable_sleep"))
    monkeypatch.setattr(openrlhf.metadata, "distribution", lambda name: SimpleNamespace(version="0.11.2"))
    yield


@pytest.mark.usefixtures("flags_of_openrlhf")
@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ((), "ZeRO-2; 2 vllm engines of 1 ranks each"),
        (("--vllm.tensor_parallel_size", "4", "--ds.zero_stage", "3"), "ZeRO-3; 2 vllm engines of 4 ranks each"),
        (("--ds.ring_attn_size", "2", "--ds.packing_samples"), "ring attention over 2"),
        (("--train.agent_func_path", "agent.py", "--train.async_enable"), "asynchronous; "),
        (("--train.async_enable", "--train.partial_rollout_enable"), "asynchronous; "),
        (("--vllm.enable_sleep", "--ds.enable_sleep"), "DeepSpeed actor ranks"),
    ],
)
def test_openrlhf_runs_that_are_accepted(flags: tuple[str, ...], shape: str) -> None:
    found = openrlhf_check(
        ["ray", "job", "submit", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *GOOD, *flags], a_qwen3
    )
    assert found.accepted and shape in found.facts["shape"], found.objections


@needs_verl
def test_in_another_trainers_environment_check_says_which_one_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "spec_plugin_verl_check.check", raising=False)
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    done = invoke("verl", "--", "x=1")
    assert done.exit_code == 2 and "this environment lacks omegaconf, which comes with verl: run it in" in done.output


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_a_method_that_nobody_provides_is_refused_with_the_one_that_was_meant() -> None:
    """As the run refuses it: an unknown name was taken for a plugin's."""
    (objection,) = openrlhf_check([*GOOD, "--spec.method", "eagle"], a_qwen3).objections
    assert "no active plugin provides it (did you mean 'eagle3'?)" in str(objection)


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_a_user_with_a_gpu_is_told_what_nobody_has_run() -> None:
    told = openrlhf_check([*GOOD, "--vllm.enable_sleep"], a_qwen3, Cluster("H100", "0.26")).facts
    assert "docs/supported.md#never-run-on-a-gpu" in told["never run on a GPU"]
    assert told["model runner"] == "V2: vLLM's own choice" and told["CUDA graphs"].startswith("full and piecewise")
    assert told["judged for"].startswith("H100 with vLLM 0.26; all else as this machine has it")


@pytest.mark.usefixtures("flags_of_openrlhf")
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("auto", "eagle3 (auto: a draft that learns along the run, born in it; mtp cannot: "),
        ("draft_model", "draft_model with a new draft, up to 8 tokens a step"),
        ("ngram", "ngram with nothing to train, up to 8 tokens a step"),
    ],
)
def test_it_says_what_would_draft(method: str, said: str) -> None:
    found = openrlhf_check([*GOOD, "--spec.method", method], a_qwen3)
    assert found.accepted and said in found.facts["method"]


@pytest.mark.usefixtures("flags_of_openrlhf")
@pytest.mark.parametrize(
    ("flags", "what", "instead"),
    [
        (("--vllm.num_engines", "0"), "rollouts without vLLM", "1 or more"),
        (("--ds.lora.rank", "8"), "unmerged", "set it to 0"),
        (("--ds.load_in_4bit",), "4-bit", "leave it out"),
        (("--ds.tensor_parallel_size", "2"), "tensor parallel actor", "set it to 1"),
        (("--data.max_images_per_prompt", "1"), "vision", "set it to 0"),
        (("--critic.freezing_steps", "5"), "the critic alone", "set it to -1"),
        (("--train.full_determinism_enable",), "actor's own process", "leave it out"),
        (("--ds.param_dtype", "fp16"), "other dtypes", "bf16"),
        (("--data.max_len", "long"), "invalid int value", "correct its value"),
        (("--data.maxlen", "9"), "no flag --data.maxlen", "did you mean --data.max_len"),
        (("--spec.k", "99"), "--spec.k", "spec-plugin options"),
        (("--spec.kk", "3"), "did you mean --spec.k", "spec-plugin options"),
        (("--rollout.top_p", "0.9", "--algo.advantage.is_correction_level", "token"), "truncated", "top_p=1.0"),
    ],
)
def test_openrlhf_objections_name_the_flag_and_what_to_do(flags: tuple[str, ...], what: str, instead: str) -> None:
    (said,) = map(str, openrlhf_check([*GOOD, *flags], a_qwen3).objections)
    assert what in said and instead in said


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_openrlhf_refuses_with_the_words_of_the_check_and_all_at_once() -> None:
    bad = ["--vllm.num_engines", "0", "--ds.load_in_4bit", "--actor.model_name_or_path", "x"]
    expected = [str(o) for o in openrlhf_check(bad, a_qwen3).objections]
    with pytest.raises(SpecConfigError) as refused:
        openrlhf_options.read_target(bad)
    assert str(refused.value) == "\n".join(expected) + ", or leave out --spec.enable" and len(expected) == 2


def test_openrlhfs_flags_are_read_from_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli").mkdir()
    source = 'for prefix in ("actor",):\n    p.add_argument(f"--{prefix}.adam.lr")\np.add_argument("--data.max_len", type=int)\n'
    (tmp_path / "cli" / "train_ppo_ray.py").write_text(source)
    monkeypatch.setattr(sources, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    assert set(openrlhf.known_flags()) == {r"\-\-\w+\.adam\.lr", r"\-\-data\.max_len"}


# the model


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_a_model_that_is_not_here_is_said_to_be_unseen_and_the_rest_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_plugin.commands.check.in_hub_cache", lambda name: None)
    found = openrlhf_check([*GOOD, "--ds.load_in_4bit"])
    assert "nothing to train" not in found.facts["method"], "nobody has seen whether a draft can be made"
    assert [o.reason for o in found.objections] == ["a 4-bit policy"]
    assert "Qwen/Qwen3-8B" in found.unseen[0] and "--model-config" in found.unseen[0]


def test_a_model_is_found_in_a_folder_and_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert find_model(str(tmp_path)).config == QWEN3
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert find_model("Qwen/Qwen3-8B").config == QWEN3
    (tmp_path / "config.json").write_text("{")
    torn = find_model(str(tmp_path))
    assert torn.config is None and torn.unreadable and "cannot be read" in torn.source


@pytest.mark.usefixtures("flags_of_openrlhf")
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
        ({"architectures": ["MiniCPMO"]}, "MiniCPMO"),
        ({"architectures": ["OfTomorrowForCausalLM"]}, "does not know"),
    ],
)
def test_a_target_whose_class_hands_out_no_hidden_states_is_refused_by_that_class(
    named: dict[str, object], said: str
) -> None:
    target = {name: value for name, value in QWEN3.items() if name not in ("architectures", "model_type")} | named
    (objection,) = openrlhf_check(GOOD, lambda name: Model(name, target, "x")).objections
    assert said in objection.reason and "spec.method to suffix, ngram or draft_model" in str(objection)
    for method in ("ngram", "draft_model", "auto"):
        assert openrlhf_check([*GOOD, "--spec.method", method], lambda name: Model(name, target, "x")).accepted


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_a_class_that_takes_drafts_and_was_never_tried_is_accepted_with_a_word() -> None:
    target = {name: value for name, value in QWEN3.items() if name != "architectures"} | {"model_type": "phi3"}
    found = openrlhf_check(GOOD, lambda name: Model(name, target, "x"))
    assert found.accepted and any("Phi3ForCausalLM" in note and "no run" in note for note in found.notes)
    assert not any("no run with such" in note for note in openrlhf_check(GOOD, a_qwen3).notes)


def test_what_was_shown_is_known_of_each_family_that_the_kit_has_and_of_no_other() -> None:
    shown = {*forecast.SHOWN_IN_A_TRAINER.split(), *forecast.SHOWN_IN_AN_ENGINE.split()}
    assert {target.engine_class for target in tiny_targets().values()} == shown


@pytest.mark.parametrize("pruned", [None, 64])
def test_the_number_of_parameters_is_that_of_the_draft(pruned: int | None) -> None:
    small = QWEN3 | {
        "vocab_size": 128,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = DraftConfig.from_target(small | {"num_key_value_heads": 2}, draft_vocab_size=pruned)
    assert config.parameters == sum(p.numel() for p in Eagle3Draft(config).parameters())


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_a_draft_that_is_given_is_looked_at(tmp_path: Path) -> None:
    small = QWEN3 | {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    target = small | {"num_key_value_heads": 1, "num_hidden_layers": 8, "model_type": "phi3"}
    config = DraftConfig.from_target(target)
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=0)
    save_draft(tmp_path / "draft", config, trainer.engine_tensors(torch.float32))
    flags = (*GOOD, "--spec.draft", str(tmp_path / "draft"))
    found = openrlhf_check(flags, lambda name: Model(name, target, "x"))
    assert found.accepted and any("Phi3ForCausalLM" in note for note in found.notes), found.objections
    found = openrlhf_check(flags, lambda name: Model(name, target | {"hidden_size": 32}, "x"))
    assert [o.reason for o in found.objections] == ["a draft for this model"] and "hidden_size=64" in str(
        found.objections[0]
    )


@pytest.mark.usefixtures("flags_of_openrlhf")
@pytest.mark.parametrize(
    ("method", "layers", "kept"),
    [
        ("eagle3", "1 layer", "2 MiB a request"),  # of a vocabulary of 152k, k=8, two bytes, at its start
        (
            "draft_model",
            "2 layers",
            "up to 9 MiB a request, or fewer drafted tokens where that has no room,",
        ),  # V1: two float32
    ],
)
def test_what_the_draft_keeps_in_the_engine_is_told(method: str, layers: str, kept: str) -> None:
    found = openrlhf_check([*GOOD, "--spec.method", method], a_qwen3)
    told = found.facts["draft in the engine"]
    assert f"the KV cache of {layers} beside the target's 36" in told
    assert f"; {kept} for what drafted tokens are drawn from" in told


@pytest.mark.parametrize(
    ("ranks", "settings", "refused"),
    [(2, {}, False), (4, {}, True), (4, {"draft_tensor_parallel_size": 1}, False), (3, {}, False)],
)
def test_heads_of_a_draft_that_ranks_cannot_share_out_are_refused(
    ranks: int, settings: dict[str, object], refused: bool
) -> None:
    """Without the flag that run would start; of 32 heads over three ranks it would not, and vLLM says so."""
    target = TargetInfo("m", QWEN3, "bfloat16", tensor_parallel=ranks)
    method = Method("frozen", settings, hf_config={"num_attention_heads": 6})
    with pytest.raises(SpecConfigError, match="a divisor of 6") if refused else nullcontext():
        refuse_unfit(method, SpecConfig.parse(None), target)


def test_a_layer_that_the_target_brings_is_one_though_its_config_json_is_the_targets() -> None:
    more = {
        "num_nextn_predict_layers": 1,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
    }
    target = TargetInfo("m", QWEN3 | more, "bfloat16")
    method = Method("mtp", {}, draft=StartingDraft(MtpShape.from_target(target.hf_config)))
    run = RunFacts(SpecConfig.parse(None), target, Model("m", target.hf_config, ""), "path", "")
    assert forecast._engine_memory(run, method, Cluster()).endswith("the KV cache of 1 layer beside the target's 36")


# the command


@needs_verl
def test_the_exit_code_and_the_json_say_whether_it_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3))
    done = invoke("verl", "--json", "--model-config", str(file), "--", PATH, VLLM)
    table = json.loads(done.stdout)
    assert (done.exit_code, table["accepted"], table["objections"], table["unseen"]) == (0, True, [], [])
    done = invoke("verl", "--json", "--", PATH, VLLM, f"{ROLLOUT}pipeline_model_parallel_size=2")
    (objection,) = json.loads(done.stdout)["objections"]
    assert done.exit_code == 1 and objection["option"] == f"{ROLLOUT}pipeline_model_parallel_size"
    assert objection["value"] == "2" and objection["instead"] == "set it to 1" and objection["sentence"]


@pytest.mark.usefixtures("flags_of_openrlhf")
def test_the_verdict_is_the_last_thing_that_is_printed() -> None:
    done = invoke("openrlhf", "--", "--ds.load_in_4bit", "--vllm.num_engines", "0")
    assert done.exit_code == 1 and "refused: this openrlhf run would stop; reasons: 3" in done.stdout
    assert done.stdout.rstrip().rpartition("\n")[2].startswith("  3. ")


@pytest.mark.parametrize("trainer", ["verl", "openrlhf", "trl"])
def test_a_shell_script_is_not_judged(trainer: str) -> None:
    done = invoke(trainer, "--", "bash", "run.sh")
    assert done.exit_code == 2 and "bash run.sh: what this program starts is not read" in done.stderr


def test_an_unknown_trainer_is_an_error_that_names_those_that_are_there() -> None:
    done = invoke("nemo", "--", "x=1")
    assert done.exit_code == 2 and "openrlhf" in done.stderr and "verl" in done.stderr


def test_help_teaches_by_example() -> None:
    text = invoke("--help").stdout
    assert "spec-plugin check verl" in text and "spec-plugin check openrlhf" in text and "Exit code" in text


def test_the_check_of_verl_is_found_beside_the_package_whose_import_is_the_flag() -> None:
    before = set(sys.modules)
    assert find_check("verl") is verl_check and find_check("openrlhf") is openrlhf.check
    assert not {"spec_plugin_verl", "verl", "vllm"} & (set(sys.modules) - before)


def test_a_whole_command_line_is_split_at_its_module() -> None:
    assert split_launch(["ray", "job", "submit", "--", "python3", "-m", "a.b", "x=1"]) == ("a.b", ["x=1"])
    assert split_launch(["x=1", "-m"]) == (None, ["x=1", "-m"])


def test_nothing_is_raised_where_nothing_is_objected() -> None:
    refuse((), "leave it out")
