"""Options and arguments, in the spelling of each trainer: each mistake is named with its value and what to write instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spec_plugin_openrlhf.check as openrlhf
import spec_plugin_openrlhf.options as openrlhf_options
from builders.bad_input import INFINITE, NAN, TARGET, missing, written
from builders.check_command import needs_verl
from omegaconf import OmegaConf
from spec_plugin_openrlhf.__main__ import main as launch
from spec_plugin_verl_check import options as verl
from spec_plugin_verl_check.compose import compose_config

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.commands.check import judge_run
from spec_plugin.plan.arguments import read_config, split_arguments
from spec_plugin.plan.run_plan import Model

OPTIONS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("draft", "", ("=''", "at least 1 character", "allowed: text or none")),
    ("draft", 5, ("=5", "text or none")),
    ("draft", ["a"], ("=['a']", "text or none")),
    ("seed", 2**64, (f"={2**64}", f"<= {2**63 - 1}")),
    ("seed", -1, ("=-1", ">= 0")),
    ("seed", "now", ("='now'", "int")),
    ("k", True, ("=True", "int >= 1 and <= 16")),
    ("k", 2.5, ("=2.5", "int >= 1 and <= 16")),
    ("k", NAN, ("=nan", "int >= 1 and <= 16")),
    ("k", "1e400", ("='1e400'", "int >= 1 and <= 16")),
    ("k", [3], ("=[3]", "int >= 1 and <= 16")),
    ("k", {"a": 3}, ("={'a': 3}", "int >= 1 and <= 16")),
    ("lr", NAN, ("=nan", "finite", "float > 0 and <= 1")),
    ("lr", "nan", ("='nan'", "finite", "float > 0 and <= 1")),
    ("logprob_tolerance", "nan", ("='nan'", "greater than 0", "float > 0")),
    ("train_share", INFINITE, ("=inf", "finite", "<= 0.5")),
    ("refresh_timeout_s", "inf", ("='inf'", "finite", "<= 86400")),
    ("gate_timeout_s", 1e12, ("=1000000000000.0", "<= 604800")),
    ("buffer_mb", 10**30, ("=1000", "<= 16777216")),
    ("memory_tokens", 2**63, (f"={2**63}", "<= 17179869184")),
    ("draft_vocab_size", 10**18, ("=1000", "<= 16777216")),
    ("train", "perhaps", ("='perhaps'", "true | false")),
    ("aux_layers", 5, ("=5", "list or none")),
    ("aux_layers", ["two"], ("='two'", "list or none")),
    ("block", "metrics", ("='metrics'", "list")),
    ("plugins", {"a": 1}, ("={'a': 1}", "list")),
    ("draft_sample_method", "synthetic", ("='synthetic'", "greedy | probabilistic")),
    ("darft", "x", ("unknown option", "='x'", "did you mean spec.draft?")),
    ("k ", 3, ("unknown option", "=3", "did you mean spec.k?")),
)


@pytest.mark.parametrize(("name", "value", "parts"), OPTIONS, ids=lambda v: str(v)[:20])
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(
    name: str, value: Any, parts: tuple[str, ...]
) -> None:
    with pytest.raises(SpecConfigError) as refused:
        SpecConfig.parse({name: value})
    assert not list(missing(str(refused.value), f"spec.{name}", *parts)), refused.value


def test_an_option_that_is_infinite_on_purpose_is_taken() -> None:
    found = SpecConfig.parse({"logprob_tolerance": INFINITE, "seed": str(2**63 - 1)})
    assert found.logprob_tolerance == INFINITE and found.seed == 2**63 - 1


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(SpecConfigError) as refused:
        SpecConfig.parse({"k": "x" * 100_000})
    assert len(str(refused.value)) < 300


# OpenRLHF


@pytest.mark.parametrize("said", ["--spec.enable=false", "--spec.enable=False", "--spec.enable=0", "--spec.enable=off"])
def test_the_switch_can_say_no(said: str) -> None:
    assert split_arguments([said, "--x", "1"]) == (["--x", "1"], {"enable": False})
    name, _, value = said.partition("=")
    assert split_arguments([name, value, "--x"]) == (["--x"], {"enable": False})


@pytest.mark.parametrize("said", ["--spec.enable", "--spec.enable=true", "--spec.enable=1", "--spec.enable=Yes"])
def test_the_switch_can_say_yes(said: str) -> None:
    assert split_arguments([said, "--x", "1"]) == (["--x", "1"], {"enable": True})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launcher did: the arguments of OpenRLHF's run, and what was installed before it."""
    done: list[Any] = []
    registration = SimpleNamespace(install=lambda theirs, ours: done.append(("install", ours)))
    monkeypatch.setitem(__import__("sys").modules, "spec_plugin_openrlhf.registration", registration)
    monkeypatch.setattr("runpy.run_module", lambda name, **_: done.append((name, __import__("sys").argv[1:])))
    monkeypatch.setattr("sys.argv", ["x"])
    return done


def test_a_switch_that_says_no_runs_the_stock_module_and_nothing_else(launched: list[Any]) -> None:
    launch(["--spec.enable=false", "--spec.k", "3", "--x", "1"])
    assert launched == [("openrlhf.cli.train_ppo_ray", ["--x", "1"])]
    launch(["--spec.enable", "--spec.k", "3"])
    assert launched[1] == ("install", {"k": "3"})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--spec.enable=perhaps"], ("--spec.enable='perhaps'", "true or false")),
        (["--spec.k"], ("--spec.k needs a value", "spec-plugin options")),
        (["--spec.k", "--x"], ("--spec.k needs a value", "spec-plugin options")),
        (["--spec.k", "3"], ("--spec.k has no effect", "--spec.enable")),
        (["--spec.enabel", "true"], ("--spec.enabel has no effect", "--spec.enable")),
    ],
    ids=str,
)
def test_the_launcher_refuses_in_one_line(launched: list[Any], given: list[str], parts: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as refused:
        launch(given)
    assert not launched and not list(missing(str(refused.value), *parts)), refused.value


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--spec.k", "many"], ("--spec.k='many'", "int >= 1 and <= 16")),
        (["--spec.draft="], ("--spec.draft=''", "text or none")),
        (["--spec.aux_layers", "2,four"], ("--spec.aux_layers='four'", "list or none")),
        (["--spec.kk", "3"], ("--spec.kk='3'", "did you mean --spec.k?")),
        (["--spec.", "3"], ("unknown option --spec.='3'", "known: method")),
        (["--spec.seed", str(2**64)], (f"--spec.seed='{2**64}'", f"<= {2**63 - 1}")),
    ],
    ids=str,
)
def test_a_bad_option_of_openrlhf_is_named_as_it_is_written(given: list[str], parts: tuple[str, ...]) -> None:
    with pytest.raises(SpecConfigError) as refused:
        read_config(split_arguments(given)[1])
    assert not list(missing(str(refused.value), *parts)), refused.value


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--sepc.k", "5"], ("no flag --sepc.k", "did you mean --spec.k?")),
        (["--spec_k", "5"], ("no flag --spec_k", "did you mean --spec.k?")),
        (["--sepc.enable"], ("no flag --sepc.enable", "did you mean --spec.enable?")),
        (["--data.max_len", "-5"], ("--data.max_len -5", "set it to")),
        (["--data.max_len", "long"], ("--data.max_len long", "invalid int value", "correct its value")),
        (["--rollout.temperature", "nan"], ("temperature=nan", "0 or more")),
        (["--rollout.temperature", "-1"], ("temperature=-1.0", "0 or more")),
        (["--rollout.top_p", "2"], ("top_p=2.0", "at most 1")),
        (["--vllm.tensor_parallel_size", "0"], ("--vllm.tensor_parallel_size 0", "set it to")),
        (["--vllm.num_engines", "-1"], ("--vllm.num_engines -1", "set it to 1 or more")),
        (["--actor.num_nodes", "0"], ("--actor.num_nodes 0", "set it to")),
        (["--ds.ring_attn_size", "0"], ("--ds.ring_attn_size 0", "set it to")),
    ],
    ids=str,
)
def test_a_bad_flag_of_openrlhf_is_named_by_the_check(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], parts: tuple[str, ...]
) -> None:
    names = [name for action in openrlhf_options._parser()._actions for name in action.option_strings]
    monkeypatch.setattr(openrlhf, "known_flags", lambda: names)
    monkeypatch.setattr(openrlhf.metadata, "distribution", lambda name: SimpleNamespace(version="0.11.2"))
    given = ["--actor.model_name_or_path", "x", "--vllm.num_engines", "1", *flags]
    said = "\n".join(map(str, judge_run("openrlhf", given, lambda name: Model(name, TARGET, "x")).objections))
    assert not list(missing(said, *parts)), said


# verl

ROLLOUT = "actor_rollout_ref.rollout."


@pytest.mark.parametrize(
    ("custom", "parts"),
    [
        ({"spec": {"spec": {"k": 5}}}, ("unknown option", "custom.spec.spec=")),
        ({"spec": 5}, ("custom.spec.*", "5")),
        ({"spec": ["k=5"]}, ("custom.spec.*", "['k=5']")),
        ("spec.k=5", ("custom.spec.*", "'spec.k=5'")),
        ({"spec": {"draft": ""}}, ("custom.spec.draft=''", "text or none")),
        ({"spec": {"seed": 2**64}}, ("custom.spec.seed=", f"<= {2**63 - 1}")),
        ({"spec": {"block": "metrics"}}, ("custom.spec.block='metrics'", "list")),
        ({"spec": {"enable": False}}, ("unknown option", "custom.spec.enable=False")),
    ],
    ids=str,
)
def test_a_bad_option_in_verls_spelling_is_named(custom: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(SpecConfigError) as refused:
        verl.read_config(SimpleNamespace(custom=custom))
    assert not list(missing(str(refused.value), *parts)), refused.value


@pytest.mark.parametrize(
    ("custom", "parts"),
    [
        ({"sepc": {"k": 5}}, ("custom.sepc.k=5", "custom.spec.k")),
        ({"Spec": {"k": 5}}, ("custom.Spec.k=5", "custom.spec.k")),
        ({"specs": {"serve": "never"}}, ("custom.specs.serve=never", "custom.spec.serve")),
        ({"spec_plugin": {"k": 5}}, ("custom.spec_plugin.k=5", "custom.spec.k")),
        ({"other": {"spec": {"draft": "x"}}}, ("custom.other.spec.draft=x", "custom.spec.draft")),
    ],
    ids=str,
)
def test_an_option_under_another_name_is_an_objection(custom: Any, parts: tuple[str, ...]) -> None:
    (objection,) = verl.misplaced({"actor_rollout_ref": {"rollout": {"custom": custom}}})
    assert not list(missing(str(objection), *parts)), objection


def test_somebody_elses_part_of_custom_is_left_alone() -> None:
    custom = {"special": {"a": 1}, "spec_x": {"depth": 3}, "mine": {"k": 5}, "spec": {"k": 5}}
    assert verl.read_config(SimpleNamespace(custom=custom)).k == 5
    assert not list(verl.misplaced({"actor_rollout_ref": {"rollout": {"custom": custom}}}))


@needs_verl
@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (f"+{ROLLOUT}custom.sepc.k=5", ("custom.sepc.k", "+actor_rollout_ref.rollout.custom.spec.k")),
        (f"+{ROLLOUT}spec.k=5", (f"+{ROLLOUT}spec.k=5", "+actor_rollout_ref.rollout.custom.spec.k")),
        ("+custom.spec.k=5", ("+custom.spec.k=5", "+actor_rollout_ref.rollout.custom.spec.k")),
        (f"+{ROLLOUT}custom.spec=5", ("custom.spec.*", "5")),
        (f"{ROLLOUT}max_num_seqs=0", (f"{ROLLOUT}max_num_seqs=0", "1 or more")),
        (f"{ROLLOUT}temperature=nan", ("temperature=nan", "0 or more")),
        (
            f"+{ROLLOUT}engine_kwargs.vllm.override_generation_config=5",
            ("override_generation_config=5", "leave it out"),
        ),
        ("algorithm.rollout_correction=5", ("algorithm.rollout_correction=5", "a section of options")),
        (f"+x={'9' * 5000}", ("4300 digits",)),
    ],
    ids=lambda v: str(v)[:60],
)
def test_a_bad_argument_of_verl_is_named_by_the_check(tmp_path: Path, given: str, parts: tuple[str, ...]) -> None:
    folder = written(tmp_path / "policy", TARGET)
    arguments = [f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}name=vllm", *given.split()]
    found = [str(o) for o in judge_run("verl", arguments).objections]
    assert len(found) == len(given.split()) and not list(missing("\n".join(found), *parts)), found


@pytest.fixture(scope="session")
def stock() -> Any:
    """The parts of verl's own configuration that are asked."""
    whole = compose_config(["actor_rollout_ref.model.path=x", f"{ROLLOUT}name=vllm"]).actor_rollout_ref
    return {name: verl.as_builtin(whole[name]) for name in ("rollout", "model")}


@needs_verl
@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("rollout.max_num_seqs", "many", (f"{ROLLOUT}max_num_seqs=many", "a whole number", "set one")),
        ("rollout.max_num_seqs", True, (f"{ROLLOUT}max_num_seqs=True", "a whole number", "set one")),
        ("rollout.max_num_seqs", -8, (f"{ROLLOUT}max_num_seqs=-8", "1 or more")),
        ("rollout.tensor_model_parallel_size", 0, (f"{ROLLOUT}tensor_model_parallel_size=0", "1 or more")),
        ("rollout.tensor_model_parallel_size", None, ("tensor_model_parallel_size=None", "a whole number", "set one")),
        ("rollout.engine_kwargs.vllm", {"max_num_seqs": 0}, ("engine_kwargs.vllm.max_num_seqs=0", "1 or more")),
        ("rollout.engine_kwargs.vllm", {"max_num_seqs": 2.5}, ("engine_kwargs.vllm.max_num_seqs=2.5", "set one")),
        ("rollout.engine_kwargs.vllm", {"tensor_parallel_size": "x"}, ("tensor_parallel_size=x", "set one")),
        ("rollout.max_model_len", "long", (f"{ROLLOUT}max_model_len=long", "a whole number", "set one")),
        ("model.lora", {"rank": "x"}, ("actor_rollout_ref.model.lora.rank=x", "a whole number", "set one")),
        ("model.lora_rank", "x", ("lora_rank=x", "a whole number", "set one")),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(stock: Any, key: str, value: Any, parts: tuple[str, ...]) -> None:
    config = OmegaConf.create(stock)
    OmegaConf.update(config, key, value, merge=False, force_add=True)
    found = [str(o) for o in verl.objections(config.rollout, config.model)]
    assert len(found) == 1 and not list(missing(found[0], *parts)), found


@pytest.mark.parametrize("off", ["off", "false", "False", "0", "no"])
def test_a_switch_that_is_off_is_off_in_each_trainer(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_plugin_trl import __main__ as trl
    from spec_plugin_trl import flag

    assert split_arguments(["--spec", off, "--x"]) == (["--x"], {"enable": False})
    assert split_arguments([f"--spec={off}", "--x"]) == (["--x"], {"enable": False})
    assert split_arguments(["--spec", "path", "--x"]) == (["--spec", "path", "--x"], {})
    ran: list[list[str]] = []
    monkeypatch.setattr(trl, "run_script", ran.append)
    monkeypatch.setattr(trl.registration, "register", lambda: ran.append(["registered"]))
    monkeypatch.setenv(flag.FLAG, "k=5")
    trl.main(["--spec", off, "train.py"])
    assert ran == [["train.py"]] and flag.turned_off(), "nor may the script turn it on"
    with pytest.raises(
        SpecConfigError, match=r"the flag is another option: leave out actor_rollout_ref\.model\.external_lib"
    ):
        verl.read_config(SimpleNamespace(custom={"spec": off}))
