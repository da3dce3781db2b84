"""TRL's adapter on real TRL: what it wraps is there, off is off, refusals come before anything starts, and a launched run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trainer

SECONDS = 900


def python(code: str, said: str | None, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the variable set to this, or without it."""
    env = {name: value for name, value in os.environ.items() if name != "SPEC_PLUGIN_TRL"}
    env |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1", **more}
    if said is not None:
        env["SPEC_PLUGIN_TRL"] = said
    command = [sys.executable, *(["-c", code] if code else []), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.parametrize("said", [None, "0", "1 k=5"])
def test_law_1_without_the_flag_nothing_of_ours_is_there(said: str | None) -> None:
    code = (
        "import sys, trl.trainer.grpo_trainer as g, trl.generation.vllm_generation as v\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0].startswith('spec_plugin') and 'trl_cpu' not in m))\n"
        "found = g.GRPOTrainer.__init__, g.GRPOTrainer.compute_loss, v.VLLMGeneration.sync_weights\n"
        "print([f.__code__.co_filename.endswith('registration.py') for f in found])\n"
        "print(isinstance(v.LLM, type))\n"
    )
    found = python(code, said)
    modules, wrapped, is_class = found.stdout.splitlines()[-3:]
    assert modules == "[]", found
    assert wrapped == "[False, False, False]" and is_class == "True"


def test_enabled_all_that_it_wraps_is_there_and_only_wrapped_once() -> None:
    code = (
        "import spec_plugin_trl\n"
        "spec_plugin_trl.enable(k=5)\n"
        "import trl.trainer.grpo_trainer as g, trl.trainer.rloo_trainer as r, trl.generation.vllm_generation as v\n"
        "from spec_plugin_trl import registration\n"
        "registration.register()\n"
        "names = '_generate_and_score_completions', '__init__'\n"
        "for owner in (g.GRPOTrainer, r.RLOOTrainer):\n"
        "    registration.look(owner, registration.METHODS[owner.__name__])\n"
        "    print([hasattr(getattr(owner, n).__wrapped__, '__wrapped__') for n in names])\n"
        "registration.look(v.VLLMGeneration, registration.METHODS['VLLMGeneration'])\n"
        "print(v.LLM)\n"
    )
    found = python(code, None)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.splitlines()[-3:-1] == ["[False, False]"] * 2 and "_llm" in found.stdout
    assert "had no effect in this process, which made no GRPOTrainer or RLOOTrainer" in found.stderr


def test_modules_that_were_imported_before_the_launcher_are_wrapped_all_the_same() -> None:
    code = (
        "import trl.trainer.grpo_trainer as g\n"
        "from spec_plugin_trl import registration\n"
        "registration.register()\n"
        "print(g.GRPOTrainer.compute_loss.__code__.co_filename.endswith('registration.py'))\n"
    )
    assert python(code, None).stdout.splitlines()[-1] == "True"


def test_trls_own_parser_reads_the_options_and_the_variable_turns_the_same_script_off(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("spec_k: 5\nlearning_rate: 0.1\n")
    code = (
        "import os, sys, spec_plugin_trl\n"
        "from trl import GRPOConfig, TrlParser\n"
        "training, spec = TrlParser((GRPOConfig, spec_plugin_trl.SpecArguments)).parse_args_and_config()\n"
        "spec_plugin_trl.enable(spec)\n"
        "import trl.trainer.grpo_trainer as g\n"
        "print(os.environ.get('SPEC_PLUGIN_TRL'), g.GRPOTrainer.compute_loss.__code__.co_filename.endswith('registration.py'))\n"
    )
    words = ("--config", str(file), "--output_dir", str(tmp_path), "--spec_train_share", "0.3", "--bf16", "false")
    assert python(code, None, *words).stdout.splitlines()[-1] == "1 k=5 train_share=0.3 True"
    assert python(code, "0", *words).stdout.splitlines()[-1] == "0 False"
    assert python(code, None, *words, "--spec", "false").stdout.splitlines()[-1] == "None False"
    wrong = python(code, None, *words, "--spec_k", "99")
    assert wrong.returncode == 1 and "SPEC_PLUGIN_TRL: k='99'" in wrong.stderr


def test_what_another_version_lacks_is_named() -> None:
    from spec_plugin_trl import registration

    from spec_plugin.adapter import PatchError
    from tools.trl_symbols import missing

    source = (
        "class T:\n    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): ...\n"
        "    def _generate_and_score_completions(self): ...\n"
        "    def _get_per_token_logps_and_entropies(self, model, *args, batch_size=None, **kwargs): ...\n"
    )
    methods = registration.METHODS["GRPOTrainer"]
    wrong = ["T._generate_and_score_completions (too many positional arguments)", "T._tool_call_loop"]
    assert missing(source, "T", methods) == wrong
    assert missing(source.replace("compute_loss", "loss"), "T", methods) == [wrong[0], "T.compute_loss", wrong[1]]
    assert missing(source + "    def _tool_call_loop(self): ...\n", "T", methods) == wrong[:1]
    assert missing(source, "U", methods) == ["U"]
    scope: dict[str, Any] = {}
    exec(source, scope)
    with pytest.raises(
        PatchError, match=r"T._generate_and_score_completions takes other arguments .* set SPEC_PLUGIN_TRL=0"
    ):
        registration.look(scope["T"], methods)
    del scope["T"]._generate_and_score_completions
    with pytest.raises(PatchError, match=r"T._generate_and_score_completions is gone"):
        registration.look(scope["T"], methods)


REFUSED = """
import json, sys, types
import spec_plugin_trl
spec_plugin_trl.enable()
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

common = dict(output_dir=sys.argv[1], use_cpu=True, bf16=False, report_to="none")
vllm = dict(common, use_vllm=True)

def attempt(name, make):
    try:
        make()
        print(json.dumps([name, "made"]))
    except Exception as error:
        print(json.dumps([name, type(error).__name__, str(error)]))

def grpo(**fields):
    return lambda: GRPOTrainer(model="none/there", reward_funcs=len, args=GRPOConfig(**{**vllm, **fields}), train_dataset=[])

attempt("plain", grpo(use_vllm=False))
attempt("server", grpo(vllm_mode="server"))
attempt("tp", grpo(vllm_tensor_parallel_size=2))
attempt("top_p", grpo(top_p=0.9))
attempt("rloo", lambda: RLOOTrainer(model="none/there", reward_funcs=len, args=RLOOConfig(**common), train_dataset=[]))
attempt("online_dpo", lambda: OnlineDPOTrainer("none/there", args=OnlineDPOConfig(**vllm), train_dataset=[]))
sys.modules["unsloth"] = types.ModuleType("unsloth")
attempt("unsloth", grpo())
"""


def test_what_is_not_supported_is_refused_by_name_before_a_model_is_read(tmp_path: Path) -> None:
    found = python(REFUSED, None, str(tmp_path))
    said = {
        row[0]: row[1:] for row in map(json.loads, (line for line in found.stdout.splitlines() if line[:2] == '["'))
    }
    expected = {
        "plain": "use_vllm=False",
        "rloo": "use_vllm=False",
        "server": "vLLM's server mode yet (vllm_mode=server): set it to colocate, or set SPEC_PLUGIN_TRL=0",
        "tp": "vllm_tensor_parallel_size=2",
        "top_p": "top_p=0.9",
        "online_dpo": "TRL's OnlineDPOTrainer",
        "unsloth": "Unsloth",
    }
    assert {name: row[0] for name, row in said.items()} == dict.fromkeys(expected, "SpecConfigError"), found.stderr[
        -3000:
    ]
    for name, text in expected.items():
        assert text in said[name][1], (name, said[name])
    assert "had no effect" not in found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spec.k", "99", "x.py"], "spec-plugin: SPEC_PLUGIN_TRL: k='99'"),
        (["--spec.k"], "--spec.k needs a value"),
        (["-m"], "no script is named"),
    ],
)
def test_the_launcher_stops_with_one_line_before_it_runs_anything(words: list[str], message: str) -> None:
    found = python("", None, "-m", "spec_plugin_trl", *words)
    assert found.returncode == 1 and message in found.stderr and "Traceback" not in found.stderr, found.stderr[-2000:]


def test_the_launchers_help_teaches() -> None:
    found = python("", None, "-m", "spec_plugin_trl", "--help")
    assert (
        found.returncode == 0 and "accelerate launch -m spec_plugin_trl" in found.stdout and "--spec.k" in found.stdout
    )


def test_a_launched_script_speculates_with_its_arguments_and_evaluates_in_between(tmp_path: Path) -> None:
    """By the launcher, with an evaluation after each step, whose samples are a phase of their own, and two generations a step."""
    from spec_plugin_conformance.launch import ENVIRONMENT, free_port
    from spec_plugin_trl_cpu.conformance import TrlDriver
    from spec_plugin_trl_cpu.run import SCRIPT

    driver = TrlDriver(tmp_path / "kit")
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
        "num_generations": 4,
        "max_completion_length": 24,
        "vllm_max_model_length": 128,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    words = ["--spec.serve", "always", "--spec.train_share=0.4", "--spec.self_test_seconds", "30", str(SCRIPT)]
    words += ["--model", str(driver.target), "--data", str(driver._data), "--reward", str(driver._reward), "--evaluate"]
    words += [
        "--out",
        str(tmp_path / "out"),
        "--steps",
        "3",
        "--set",
        *(f"{n}={json.dumps(v)}" for n, v in fields.items()),
    ]
    # vLLM is told to load no plugin but the one that makes it run here: ours needs none
    environment = {**ENVIRONMENT, "SPEC_PLUGIN_TRL_CPU": "1", "VLLM_PLUGINS": "spec_plugin_trl_cpu"}
    environment["MASTER_PORT"] = str(free_port())  # TRL begins with 29500, as another run beside this one
    found = python("", None, "-m", "spec_plugin_trl", *words, **environment)
    assert found.returncode == 0, found.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    said = found.stderr[-4000:]
    assert all(row["spec/failed"] == 0 and row["spec/logprob_diff_max"] < 1e-3 for row in rows), said
    assert [row["spec/policy_version"] for row in rows] == [0, 1, 2] and rows[-1]["spec/draft_version"] > 0
    assert "the self-test passed" in found.stderr + found.stdout


def test_a_policy_that_calls_a_tool_drafts_in_each_of_its_turns(tmp_path: Path) -> None:
    """TRL parses the call and answers it; what the tool says is in the response, and not judged as the policy's."""
    from spec_plugin_conformance.driver import RunSettings
    from spec_plugin_trl_cpu.conformance import TrlDriver

    options = {"serve": "always", "train_share": 0.4, "self_test_seconds": 30}
    driver = TrlDriver(tmp_path / "kit", "tools")
    rows = list(dict(driver.launch(RunSettings(tmp_path / "run", steps=4, options=options))).values())
    assert len(rows) == 4
    for row in rows:
        assert row["spec/failed"] == 0 and row["spec/logprob_diff_max"] < 1e-3, row
        assert row["tools/call_frequency"] > 0.2 and row["tools/failure_frequency"] < 0.5, row
    assert rows[-1]["spec/acceptance_length"] > 1.2 and rows[-1]["spec/draft_version"] > 0, rows[-1]


def test_a_function_of_the_users_that_asks_vllm_itself_is_drafted_for_and_verified(tmp_path: Path) -> None:
    """Two turns by ``LLM.generate``, in training and in an evaluation with the same weights; what stands between is no answer."""
    from spec_plugin_trl_cpu.conformance import TrlDriver
    from spec_plugin_trl_cpu.run import TrlCpuRun

    driver = TrlDriver(tmp_path / "kit")
    run = TrlCpuRun(
        driver.target,
        driver._data,
        driver._reward,
        tmp_path / "run",
        5,
        overrides=("spec.serve=always", "spec.train_share=0.4", "spec.self_test_seconds=30"),
        words=("--rollouts", "spec_plugin_trl_cpu.rollouts:two_turns_by_vllm"),
        settings={
            "per_device_train_batch_size": 8,
            "num_generations": 8,
            "max_completion_length": 40,
            "vllm_max_model_length": 256,
            "learning_rate": 1e-3,
            "temperature": 1.0,
            "output_dir": str(tmp_path / "checkpoints"),
        },
    )
    rows = [metrics for _, metrics in run.follow()]
    assert len(rows) == 5 and all(row["spec/failed"] == 0 and row["spec/logprob_diff_max"] < 1e-3 for row in rows)
    assert rows[-1]["spec/acceptance_length"] > 1.1 and rows[-1]["spec/draft_version"] > 0, rows[-1]
