"""The quickstart's parts that need no engine: task, reward, data, command lines, following a run, report."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from builders.paths import ROOT
from spec_plugin_conformance import launch
from spec_plugin_openrlhf_cpu import run as openrlhf
from spec_plugin_verl_cpu import run as verl

from examples.quickstart import report
from examples.quickstart.data import build_data, build_openrlhf_data
from examples.quickstart.policy import (
    PolicySettings,
    build_model,
    build_policy,
    build_tokenizer,
    cached_policy,
    deepen,
    made_whole,
    question,
    teaching_batches,
    worked_answer,
)
from examples.quickstart.reward import compute_score, reward_func
from examples.quickstart.trainers import TRAINERS

TINY = PolicySettings(steps=3, batch_size=2, hidden_size=64, digits=(2,))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------- task and reward


def test_a_careful_answer_is_worth_one() -> None:
    rng = random.Random(1)
    for _ in range(200):
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        assert compute_score("", worked_answer(a, b), str(a + b)) == 1.0


def test_worked_answer_is_written_column_by_column() -> None:
    assert worked_answer(47, 85) == "7+5+0=12\n4+8+1=13\n#132"


def test_a_slip_costs_the_reward_and_carries_on() -> None:
    rng = random.Random(0)
    slipped = worked_answer(47, 85, rng, slip=1.0)
    assert compute_score("", slipped, "132") == 0.0
    assert slipped.count("\n") == 2 and "#" in slipped


@pytest.mark.parametrize("text", ["", "132", "#", "# ", "#1320", "#132 or #133", "#13 2"])
def test_anything_but_the_sum_after_the_last_mark_is_worth_nothing(text: str) -> None:
    assert compute_score("", text, "132") == 0.0


def test_silent_layers_change_nothing_at_first_and_learn() -> None:
    tokenizer = build_tokenizer(TINY.vocab_size)
    model = build_model(TINY, tokenizer)
    deep = deepen(model, 24)
    ids = torch.arange(1, 31)[None]
    assert len(deep.model.layers) == deep.config.num_hidden_layers == 32
    assert sum(bool(layer.mlp.down_proj.weight.any()) for layer in deep.model.layers) == TINY.layers
    torch.testing.assert_close(deep(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    deep(input_ids=ids, labels=ids).loss.backward()
    assert all(bool(layer.mlp.down_proj.weight.grad.any()) for layer in deep.model.layers)


def test_policy_is_taught_on_exactly_the_prompt_format_that_verl_renders(tmp_path: Path) -> None:
    import pandas as pd

    train, _ = build_data(tmp_path, TINY, train=4, val=4)
    tokenizer = build_tokenizer(TINY.vocab_size)
    row = pd.read_parquet(train).iloc[0]
    rendered = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, tokenize=False)
    ids, labels = next(teaching_batches(TINY, tokenizer))
    prompt = tokenizer.decode(ids[0][(labels[0] == -100) & (ids[0] != tokenizer.pad_token_id)])
    assert rendered.startswith("<|user|>") and rendered.endswith("=<|assistant|>")
    assert prompt.startswith("<|user|>") and prompt.endswith("=<|assistant|>") and len(prompt) == len(rendered)
    assert labels[0][labels[0] != -100][-1] == tokenizer.eos_token_id
    assert tokenizer(rendered).input_ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert set(row.index) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def test_both_trainers_get_the_same_prompts_and_sums(tmp_path: Path) -> None:
    import pandas as pd

    train, _ = build_data(tmp_path, TINY, train=8, val=4)
    verls = pd.read_parquet(train)
    others = [json.loads(line) for line in build_openrlhf_data(tmp_path, TINY, 8).read_text().splitlines()]
    assert [row["prompt"] for row in others] == [list(prompt) for prompt in verls["prompt"]]
    assert [row["label"] for row in others] == [model["ground_truth"] for model in verls["reward_model"]]


def test_openrlhfs_reward_reads_prompt_response_and_end_token() -> None:
    prompt, answer = "<|user|>47+85=<|assistant|>", worked_answer(47, 85)
    assert reward_func([f"{prompt}{answer}<|im_end|>"], [prompt], ["132"]) == {"rewards": 1.0, "scores": 1.0}
    assert reward_func([prompt + answer], [prompt], ["133"])["rewards"] == 0.0


def test_data_is_the_same_for_the_same_seed_and_validation_differs(tmp_path: Path) -> None:
    first = build_data(tmp_path / "a", TINY, 16, 16)
    second = build_data(tmp_path / "b", TINY, 16, 16)
    assert [f.read_bytes() for f in first] == [f.read_bytes() for f in second]
    assert first[0].read_bytes() != first[1].read_bytes()


def test_policy_is_bitwise_the_same_for_the_same_seed_and_cached(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    threads = torch.get_num_threads()
    one = build_policy(tmp_path / "one", TINY, show=False)
    two = cached_policy(tmp_path, TINY, show=False)
    a, b = (load_file(p / "model.safetensors") for p in (one, two))
    assert all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()
    assert {t.dtype for t in a.values()} == {torch.float32}
    stamp = (two / "model.safetensors").stat().st_mtime_ns
    assert cached_policy(tmp_path, TINY, show=False) == two
    assert (two / "model.safetensors").stat().st_mtime_ns == stamp
    assert torch.get_num_threads() == threads


def test_an_interrupted_policy_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    left, others = (tmp_path / f"policy-{TINY.digest}.{word}.partial" for word in ("killed", "at-work"))
    for partial in (left, others):
        partial.mkdir()
        (partial / "config.json").write_text("{}")
    os.utime(left, (0, 0))
    assert (cached_policy(tmp_path, TINY, show=False) / "model.safetensors").exists()
    assert [path.name for path in tmp_path.glob("*.partial")] == [others.name]


def test_of_two_that_make_the_same_folder_the_faster_one_is_kept(tmp_path: Path) -> None:
    with made_whole(tmp_path / "made") as partial:
        (partial / "by").write_text("the slower one")
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "by").write_text("the faster one")
    assert (tmp_path / "made" / "by").read_text() == "the faster one" and not partial.exists()


def test_any_setting_changes_the_digest() -> None:
    assert len({TINY.digest, PolicySettings().digest, PolicySettings(seed=1).digest}) == 3


def test_chat_template_takes_a_system_message_and_a_finished_turn() -> None:
    tokenizer = build_tokenizer(320)
    chat = [{"role": "system", "content": "add"}, *question(1, 2), {"role": "assistant", "content": "#3"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|system|>add<|user|>1+2=<|assistant|>#3<|im_end|>\n"


# ------------------------------------------------------------------------------------------------- starting a trainer


def verl_run(out: Path, **changes: object) -> verl.VerlRun:
    files = {name: out / name for name in ("policy", "train_file", "val_file", "reward_file")}
    return verl.VerlRun(**{**files, "out": out, "steps": 3, **changes})  # type: ignore[arg-type]


def openrlhf_run(out: Path, **changes: object) -> openrlhf.OpenRLHFRun:
    files = {name: out / name for name in ("policy", "data_file", "reward_file")}
    return openrlhf.OpenRLHFRun(**{**files, "out": out, "steps": 3, **changes})  # type: ignore[arg-type]


def test_the_plugin_is_one_flag_and_plain_differs_by_it_alone(tmp_path: Path) -> None:
    on, off = (verl.arguments(verl_run(tmp_path, plain=plain)) for plain in (False, True))
    assert [a for a in on if a not in off] == [verl.PLUGIN_FLAG]
    assert [a for a in off if a not in on] == []
    on, off = (list(openrlhf_run(tmp_path, plain=plain).launch().command) for plain in (False, True))
    assert [a for a in on if a not in off] == ["spec_plugin_openrlhf", "--spec.enable"]
    assert [a for a in off if a not in on] == ["openrlhf.cli.train_ppo_ray"]


def test_verls_overrides_come_last_so_that_they_win(tmp_path: Path) -> None:
    assert verl.arguments(verl_run(tmp_path, overrides=("data.seed=7",)))[-1] == "data.seed=7"


def test_a_run_on_nodes_joins_the_cluster_that_it_starts_and_one_run_as_a_job_starts_cold(tmp_path: Path) -> None:
    run = verl_run(tmp_path, nodes=2)
    joined = verl.arguments(run)
    assert "trainer.nnodes=2" in joined
    for name in ("num_cpus", "num_gpus", "object_store_memory"):  # Ray refuses these of who joins a cluster
        assert [w for w in joined if f"ray_init.{name}=" in w][-1].endswith("=null")
    assert run.launch({}).command[2:5] == ("spec_plugin_verl_cpu.nodes", "2", "verl.trainer.main_ppo")
    job = openrlhf_run(tmp_path, submitted=True).launch({})
    assert job.command[2] == "spec_plugin_openrlhf_cpu.job" and job.interpreter is None


def test_openrlhfs_overrides_replace_a_flag_and_what_follows_from_it(tmp_path: Path) -> None:
    overrides = ("--rollout.batch_size", "4", "--actor.adam.lr=1e-3", "--actor.adam.betas", "0.9", "0.99")
    words = openrlhf.arguments(openrlhf_run(tmp_path, overrides=overrides))
    flags = openrlhf.parse_flags(words)
    assert words.count("--rollout.batch_size") == 1
    assert flags["--rollout.batch_size"] == ("4",) and flags["--actor.adam.lr"] == ("1e-3",)
    assert flags["--train.batch_size"] == ("32",) and flags["--data.max_samples"] == ("12",)
    assert flags["--actor.adam.betas"] == ("0.9", "0.99") and flags["--vllm.enforce_eager"] == ()
    with pytest.raises(ValueError, match="'lr'"):
        openrlhf.parse_flags(("lr", "3"))


def test_what_the_user_set_in_the_environment_stays_but_the_platform_is_the_cpu(tmp_path: Path) -> None:
    env = verl_run(tmp_path).launch({"OMP_NUM_THREADS": "4", "VERL_PLATFORM": "cuda"}).env
    assert env["OMP_NUM_THREADS"] == "4" and env["VERL_PLATFORM"] == "cpu"
    assert env["VERL_USE_EXTERNAL_MODULES"] == "spec_plugin_verl_cpu"
    env = openrlhf_run(tmp_path).launch({"OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cuda"}).env
    assert env["OMP_NUM_THREADS"] == "4" and env["DS_ACCELERATOR"] == "cpu"


def test_a_step_of_openrlhf_is_read_from_its_log_whatever_its_numbers_are() -> None:
    line = (
        "\x1b[36m(PPOTrainer pid=7663)\x1b[0m INFO 11-21 14:32:15 ppo_trainer.py:551] ✨ Global step 2: {'reward': 0.5, "
        "'kl': nan, 'worst': -inf, 'n': np.float64(3.0), 't': tensor(4.), 'spec/on': 1, 'text': 'a: nan, b', 'none': None}"
    )
    step, metrics = openrlhf.step_record(line) or (0, {})
    assert step == 2 and math.isnan(metrics.pop("kl"))
    assert metrics == {"reward": 0.5, "worst": -math.inf, "n": 3.0, "t": 4.0, "spec/on": 1}
    assert openrlhf.step_record("(PPOTrainer pid=7) ✨ Evaluation completed, global_step 2, eval_metrics: {}") is None


def test_a_half_written_line_is_left_for_the_next_look(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert launch.read_lines(file, 0) == ([], 0)
    file.write_text('{"step": 1}\n{"st')
    lines, position = launch.read_lines(file, 0)
    assert lines == ['{"step": 1}'] and position == 12
    file.write_text('{"step": 1}\n{"step": 2}\n')
    assert launch.read_lines(file, position) == (['{"step": 2}'], 24)


def fake_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a `verl.trainer.main_ppo` first on the path of the child process."""
    package = tmp_path / "fake" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main_ppo.py").write_text("import json, os, pathlib, sys\n" + body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setattr(verl, "MODULES", ())  # none of what the real one imports


LOG_STEP = """
out = pathlib.Path(os.environ["VERL_FILE_LOGGER_PATH"])
def log(step, **data):
    with out.open("a") as f: f.write(json.dumps({"step": step, "data": data}) + "\\n")
"""


def test_following_a_run_yields_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        LOG_STEP
        + 'log(0, val=1)\nfor s in (1, 2, 3): log(s, **{"training/global_step": s, "critic/score/mean": s / 4})'
    )
    fake_verl(tmp_path, monkeypatch, body)
    steps = list(verl_run(tmp_path / "out").follow())
    assert [(s, m["critic/score/mean"]) for s, m in steps] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_a_failure_carries_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_verl(tmp_path, monkeypatch, "print('much noise')\nraise ValueError('no such model')")
    with pytest.raises(launch.RunFailed, match="step 0 of 3") as failure:
        list(verl_run(tmp_path / "out").follow())
    assert "ValueError: no such model" in str(failure.value)


def test_an_early_end_with_exit_code_zero_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_verl(tmp_path, monkeypatch, LOG_STEP + 'log(1, **{"training/global_step": 1})')
    with pytest.raises(launch.RunFailed, match="step 1 of 3"):
        list(verl_run(tmp_path / "out").follow())


def test_a_run_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STALL_S", 4.0)
    monkeypatch.setattr(launch, "PATIENCE_S", 0.5)
    body = """
import subprocess, time
lost = "def lost_in_here():\\n import time; time.sleep(600)\\nlost_in_here()"
def worker(): return subprocess.Popen([sys.executable, "-c", lost])
def waits_for_the_worker(): worker().wait(); time.sleep(600)
waits_for_the_worker()
"""
    fake_verl(tmp_path, monkeypatch, LOG_STEP + 'log(1, **{"training/global_step": 1})' + body)
    with pytest.raises(launch.RunFailed, match="completed no step for 4 s") as failure:
        list(verl_run(tmp_path / "out").follow())
    assert "in lost_in_here" in str(failure.value) and "in waits_for_the_worker" in str(failure.value)


@pytest.mark.parametrize(
    "last_words",
    [
        "The current node timed out during startup: raylet",
        # as torch says it, long after Ray's start
        "Started a local Ray instance.\\ntorch.distributed.DistNetworkError: The server socket has failed to listen on any "
        "local network address. port: 42427, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ],
)
def test_a_start_that_the_machine_refused_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: str
) -> None:
    body = (
        LOG_STEP
        + f"""
mark = pathlib.Path({str(tmp_path)!r}, "tried")
if not mark.exists():
    mark.touch()
    sys.exit("{last_words}")
for s in (1, 2, 3): log(s, **{{"training/global_step": s}})
"""
    )
    fake_verl(tmp_path, monkeypatch, body)
    assert [step for step, _ in verl_run(tmp_path / "out").follow()] == [1, 2, 3]
    (kept,) = (tmp_path / "out").glob("first-*.log")
    assert last_words.split("\\n")[-1] in kept.read_text()


def test_a_failure_after_rays_start_is_not_tried_again(tmp_path: Path) -> None:
    assert launch.ray_failed_to_start("worker.py:1 -- The current node timed out during startup. raylet")
    assert launch.ray_failed_to_start("Started a local Ray instance.\nFailed to register worker")
    assert not launch.ray_failed_to_start("Started a local Ray instance.\nraylet pid=3: ValueError: no such model")
    assert not launch.ray_failed_to_start("hydra: Could not override 'data.sed'")
    assert not launch.port_was_taken("Started a local Ray instance.\nValueError: port 80 is not allowed")
    # torch says this of one address, and then takes another
    warned = "[W socket.cpp:200] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
    assert not launch.port_was_taken(f"{warned}\nTraceback (most recent call last):\nValueError: no such model")


def test_a_cancelled_run_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    body = (
        LOG_STEP
        + f"""
import time
pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
log(1, **{{"training/global_step": 1}})
time.sleep(100)
"""
    )
    fake_verl(tmp_path, monkeypatch, body)
    steps = verl_run(tmp_path / "out").follow()
    assert next(steps)[0] == 1
    steps.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# ------------------------------------------------------------------------------------------------- report


def records(steps: int = 6) -> list[report.Record]:
    metrics = [
        {
            "critic/score/mean": 0.4 + 0.05 * s,
            "actor/spec/acceptance_length": 1 + 0.3 * s,
            "actor/spec/draft_loss": float("nan") if s == 2 else 3 / s,
            "actor/spec/on": float(s > 2),
            "timing_s/gen": 2.0,
            "timing_s/step": None,
        }
        for s in range(1, steps + 1)
    ]
    return [report.record(i, m, TRAINERS["verl"]) for i, m in enumerate(metrics, 1)]


def test_both_trainers_fill_the_same_columns() -> None:
    for trainer in TRAINERS.values():
        metrics = {trainer.metric_prefix + name: 1.0 for name in report.SPEC_METRICS.values()}
        metrics |= dict.fromkeys(trainer.metric_names.values(), 2.0)
        row = report.record(1, metrics, trainer)
        assert all(row[column.name] is not None for column in report.COLUMNS)
        assert set(trainer.metric_names) <= set(report.OWN_METRICS)


def test_a_missing_or_non_finite_number_is_a_dash_and_null_never_a_number(tmp_path: Path) -> None:
    rows = records()
    assert rows[1]["draft_loss"] is None and rows[0]["step_s"] is None
    report.write_json(rows, {"steps": 6}, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["steps"][1]["draft_loss"] is None
    cells = [list(column.cells) for column in report.table(rows, "title").columns]
    assert any(report.MISSING in column for column in cells)


def test_summary_compares_the_first_with_the_last_steps() -> None:
    first, last = report.summary(records(10))["reward"]
    assert first == pytest.approx(0.55) and last == pytest.approx(0.8)
    assert report.summary(records(10))["step_s"] == (None, None)


@pytest.mark.parametrize("rows", [records(), records(1), []])
def test_picture_is_written_whatever_is_missing(tmp_path: Path, rows: list[report.Record]) -> None:
    report.write_picture(rows, "title", tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    report.table(rows, "title")
    report.summary(rows)


def test_a_slow_first_step_does_not_flatten_the_time_axis() -> None:
    assert report.top_without_outlier([[40.0, 6.0, 7.0], [12.0, 3.0]]) == pytest.approx(9.1)
    assert report.top_without_outlier([[8.0, 6.0, 7.0]]) is None
    assert report.top_without_outlier([[5.0], []]) is None


def test_it_ends_by_naming_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.quickstart.run import conclude

    conclude(verl_run(tmp_path), TRAINERS["verl"], records(), 60.0, report.parts(records(), 50.0))
    assert capsys.readouterr().out.rstrip().endswith(f"spec-plugin report {tmp_path}")


# ------------------------------------------------------------------------------------------------- environment, make


@pytest.mark.parametrize(
    ("trainer", "no_deps"), [("verl", ("TransferQueue==0.1.11",)), ("openrlhf", ("openrlhf==0.11.2",))]
)
def test_pins_are_sorted_by_their_tags_and_exact(trainer: str, no_deps: tuple[str, ...]) -> None:
    make_env = load(ROOT / "tools" / "make_env.py")
    pins = make_env.Pins.parse(make_env.pins_file(trainer).read_text())
    assert pins.torch == "torch==2.13.0+cpu"
    assert pins.no_deps == no_deps
    assert pins.never == ("torchvision", "torchaudio", "torchcodec")
    assert all("==" in line for line in (*pins.normal, *pins.no_deps))


def test_make_env_knows_the_quickstarts_trainers() -> None:
    assert tuple(TRAINERS) == load(ROOT / "tools" / "make_env.py").TRAINERS


def test_make_env_installs_again_when_either_project_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_env = load(ROOT / "tools" / "make_env.py")
    assert all((project / "pyproject.toml").is_file() for project in make_env.PROJECTS)
    projects = tuple(tmp_path / name for name in ("plain", "cpu"))
    for project in projects:
        project.mkdir()
        (project / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "env").mkdir()
    done: list[str] = []
    monkeypatch.setattr(make_env, "PROJECTS", projects)
    monkeypatch.setattr(make_env, "create", lambda folder, pins: done.append("environment"))
    monkeypatch.setattr(make_env, "install_project", lambda folder: done.append("projects"))
    for changed in (None, None, *projects):
        if changed is not None:
            (changed / "pyproject.toml").write_text("[project]\nversion = '2'\n")
        make_env.bring_up_to_date(tmp_path / "env", make_env.pins_file("verl"))
    assert done == ["environment", "projects", "projects", "projects"]


def test_make_env_refuses_another_python_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_env = load(ROOT / "tools" / "make_env.py")
    monkeypatch.setattr(make_env, "PYTHONS", ((3, 99),))
    with pytest.raises(SystemExit) as stop:
        make_env.main(["openrlhf", "--folder", str(tmp_path / "envs")])
    assert "Python 3.11" in str(stop.value) and "\n" not in str(stop.value)
    assert not (tmp_path / "envs").exists()


def test_no_private_host_and_no_path_of_one_machine() -> None:
    for file in (
        *ROOT.glob("tools/*"),
        *ROOT.glob("examples/quickstart/*.py"),
        ROOT / "Makefile",
        ROOT / ".ci/run",
    ):
        if file.is_file():
            text = file.read_text()
            assert "/opt/" not in text and "/work/" not in text and "/root" not in text, file
            assert text.count("://") == text.count("https://download.pytorch.org/whl/cpu"), file


def test_help_teaches_the_flag_and_make_lists_its_targets(
    warm_run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    script = ROOT / "examples" / "quickstart" / "run.py"
    text = warm_run(str(script), "--help", check=True).stdout
    assert verl.PLUGIN_FLAG in text and openrlhf.PLUGIN_FLAG in text and "--plain" in text
    targets = subprocess.run(["make", "-s", "-C", str(ROOT), "help"], text=True, capture_output=True, check=True).stdout
    assert {"quickstart", "test", "lint"} <= set(targets.split())


def test_what_the_plugin_says_before_the_first_step_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start of actor and engines takes more than a minute, of which nothing was to be seen."""
    from threading import Event

    from rich.progress import Progress

    from examples.quickstart import run

    log, progress, started = tmp_path / "log", Progress(disable=True), Event()
    log.write_text("noise\nINFO 12:00 spec-plugin: the self-test begins\nWARNING spec-plugin: no progress\n")
    task = progress.add_task("GRPO", now="starting")
    waits = iter([False, False, True])
    started.wait = lambda timeout=None: next(waits)  # type: ignore[assignment,method-assign]
    run.tell_start(log, started, progress, task)
    assert progress.tasks[0].fields["now"] == "the self-test begins"
    assert capsys.readouterr().out.count("the self-test begins") == 1
