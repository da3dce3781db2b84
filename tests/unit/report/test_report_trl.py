"""What TRL writes of a run, as a user would point the report at it: checkpoints and event files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders.paths import ROOT

from spec_plugin.commands.report import build
from spec_plugin.commands.report.build import make_report, to_text
from spec_plugin.commands.report.formats import LogFormat
from spec_plugin.commands.report.read import ReportError, read_runs
from spec_plugin.commands.report.run import LoggedRun

DATA = ROOT / "tests" / "data" / "report" / "trl-flag"
STATE = "trainer_state.json"
FORMATS = [LogFormat.model_validate_json(f.read_text()) for f in sorted((ROOT / "adapters").rglob("log.json"))]
NEWEST: dict[str, Any] = json.loads((DATA / "checkpoint-6" / STATE).read_text())
STEPS: list[dict[str, float]] = NEWEST["log_history"]


def read(path: Path) -> LoggedRun:
    (run,) = read_runs(path, FORMATS)
    return run


def checkpoint(folder: Path, step: int, records: Sequence[dict[str, Any]] = (), age: int = 0, **fields: Any) -> Path:
    """A checkpoint as it is after a step, with what was logged until then."""
    file = folder / f"checkpoint-{step}" / STATE
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = list(records) or [{**STEPS[n % len(STEPS)], "step": n + 1} for n in range(step)]
    file.write_text(json.dumps({**NEWEST, "global_step": step, "log_history": kept, **fields}))
    os.utime(file, (1000 - age, 1000 - age))
    return file


# ---- a real run: six steps with the flag, a checkpoint after each third


def test_all_that_a_run_has_written_says_the_same() -> None:
    whole = read(DATA)
    assert (whole.name, whole.trainer, whole.numbers) == ("trl-flag", "TRL", (1, 2, 3, 4, 5, 6))
    assert not whole.remarks
    exact, events = (read(DATA / part) for part in (f"checkpoint-6/{STATE}", "runs"))
    assert exact.name == "trl-flag" and events.trainer == "TRL" and events.numbers == exact.numbers
    for step in exact.numbers:
        assert events.steps[step] == whole.steps[step] == pytest.approx(exact.steps[step], rel=1e-6)
    names = {"step_s", "reward", "response_tokens", "lr", "entropy", "grad_norm", "spec/on", "spec/cost_s"}
    assert names <= exact.steps[6].keys()


def test_a_folder_of_several_runs_has_each_with_its_checkpoints_and_event_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "flag"):
        shutil.copytree(DATA, tmp_path / name)
    monkeypatch.setattr(build, "log_formats", lambda: FORMATS)
    made = make_report([tmp_path])
    assert [run.name for run in made.runs] == ["flag", "plain"] and not made.problems


def test_steps_after_the_last_checkpoint_are_read_from_the_event_files(tmp_path: Path) -> None:
    shutil.copytree(DATA / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.copytree(DATA / "runs", tmp_path / "runs")
    run = read(tmp_path)
    assert (run.name, run.numbers) == (tmp_path.name, (1, 2, 3, 4, 5, 6))


# ---- checkpoints


def test_the_checkpoint_of_the_last_step_is_read_whatever_the_files_times_are(tmp_path: Path) -> None:
    for age, step in enumerate((9, 10, 8, 2)):
        checkpoint(tmp_path, step, age=age)
    run = read(tmp_path)
    assert run.numbers == tuple(range(1, 11)) and not run.remarks


def test_a_checkpoint_that_was_cut_off_while_it_was_written_is_said_and_the_one_before_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    torn = checkpoint(tmp_path, 6)
    torn.write_text(torn.read_text()[:3000])
    run = read(tmp_path)
    assert run.numbers == (1, 2, 3, 4)
    assert run.remarks == (f"checkpoint-6/{STATE}: it is no JSON, or was cut off while it was written",)


def test_an_event_file_of_a_run_that_was_resumed_takes_over_from_the_step_where_it_begins(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3, [{**STEPS[0], "step": n, "reward": 9.0} for n in range(1, 9)])
    shutil.copytree(DATA / "runs", tmp_path / "runs")
    run = read(tmp_path)
    assert run.numbers == (1, 2, 3, 4, 5, 6) and 9.0 not in run.series("reward").values()


@pytest.mark.parametrize("text", ["[]", "{}", '{"log_history": 3}', '{"log_history": [1, {"step": "x"}]}', "[" * 9999])
def test_a_state_file_of_anything_is_a_sentence(tmp_path: Path, text: str) -> None:
    checkpoint(tmp_path, 4).write_text(text)
    with pytest.raises(ReportError, match="no step of"):
        read(tmp_path)


def test_evaluations_between_the_logged_steps_are_no_steps(tmp_path: Path) -> None:
    records = [{**STEPS[0], "step": n} for n in (10, 20, 30)]
    records[1:1] = [{"eval_loss": 0.5, "eval_reward": 1.0, "epoch": 0.2, "step": 15}]
    records.append({"train_runtime": 5.0, "train_loss": 0.1, "epoch": 0.5, "step": 32})
    checkpoint(tmp_path, 32, records)
    run = read(tmp_path)
    assert run.numbers == (10, 20, 30) and not run.remarks


def test_steps_that_are_logged_one_in_ten_are_none_that_are_missing_and_count_for_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{**STEPS[0], "step": n, "step_time": 2.0, "spec/cost_so_far_s": 7.0} for n in (10, 20, 40, 50)]
    checkpoint(tmp_path, 50, records)
    monkeypatch.setattr(build, "log_formats", lambda: FORMATS)
    (run,) = make_report([tmp_path]).runs
    assert run.remarks == ("steps are missing between the first and the last: 30",)
    earned = run.earned
    assert earned is not None and (earned.run_s, earned.cost_s) == (4 * 2.0 * 10, 7.0)
    assert ": 4 steps (one in 10 is logged) of TRL, " in "\n".join(to_text(make_report([tmp_path])))


@pytest.mark.parametrize(
    ("numbers", "every"),
    [
        ((7,), 1),
        ((1, 2, 3, 5), 1),
        ((10, 20), 10),
        ((1, 10, 20), 10),  # the first step is logged, too
        ((10, 20, 30, 50), 10),
        ((1, 3, 4), 1),
        ((1, 1_000_000), 1),  # two ends are no rhythm
        ((8, 9), 1),
    ],
)
def test_of_how_many_steps_one_was_logged(numbers: tuple[int, ...], every: int) -> None:
    assert LoggedRun("run", "", {number: {} for number in numbers}).every == every


def test_numbers_beside_the_step_in_json_lines_are_a_step_and_rollouts_are_none(tmp_path: Path) -> None:
    lines = [json.dumps({**STEPS[0], "step": n, "note": None}) for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "completion": "2", "reward": 1.0, "entropy": 1.0}\n' * 3)
    run = read(tmp_path)
    assert run.numbers == (1, 2) and run.trainer == "TRL" and run.sources == (str(tmp_path / "metrics.jsonl"),)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ReportError, match="no step of a trainer is in it"):
        read(tmp_path)
