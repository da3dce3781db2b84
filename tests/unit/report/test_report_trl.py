"""What TRL writes of a run, as a user would point the report at it: checkpoints, event files, the console log."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.paths import ROOT

from spec_plugin.commands.report import build
from spec_plugin.commands.report.build import make_report, to_text
from spec_plugin.commands.report.formats import LogFormat
from spec_plugin.commands.report.numbering import Bar, Unnumbered, numbered, training_bars
from spec_plugin.commands.report.places import ReportError, find_places
from spec_plugin.commands.report.read import read_place
from spec_plugin.commands.report.run import LoggedRun, spacing

DATA = ROOT / "tests" / "data" / "report" / "trl-flag"
STATE = "trainer_state.json"
FORMATS = [LogFormat.model_validate_json(f.read_text()) for f in sorted((ROOT / "adapters").rglob("log.json"))]
NEWEST: dict[str, Any] = json.loads((DATA / "checkpoint-6" / STATE).read_text())
STEPS: list[dict[str, float]] = NEWEST["log_history"]


def read(path: Path) -> LoggedRun:
    (place,) = find_places(path, FORMATS)
    return read_place(place, FORMATS)


def checkpoint(folder: Path, step: int, records: Sequence[dict[str, Any]] = (), age: int = 0, **fields: Any) -> Path:
    """A checkpoint as it is after a step, with what was logged until then."""
    file = folder / f"checkpoint-{step}" / STATE
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = list(records) or [{**STEPS[n % len(STEPS)], "step": n + 1} for n in range(step)]
    file.write_text(json.dumps({**NEWEST, "global_step": step, "max_steps": 20, "log_history": kept, **fields}))
    os.utime(file, (1000 - age, 1000 - age))
    return file


# ---- a real run: six steps with the flag, a checkpoint after each third, the log written to a file


def test_all_that_a_run_has_written_says_the_same() -> None:
    whole = read(DATA)
    assert (whole.name, whole.trainer, whole.numbers, whole.planned) == ("trl-flag", "TRL", (1, 2, 3, 4, 5, 6), 6)
    assert len(whole.sources) == 4 and not whole.remarks
    exact, events, log = (read(DATA / part) for part in (f"checkpoint-6/{STATE}", "runs", "trl.log"))
    assert exact.steps == whole.steps and (exact.name, exact.planned) == ("trl-flag", 6)
    assert events.trainer == log.trainer == "TRL" and events.numbers == log.numbers == exact.numbers
    for step in exact.numbers:
        assert events.steps[step] == pytest.approx(exact.steps[step], rel=1e-6)
        assert log.steps[step] == pytest.approx(exact.steps[step], rel=1e-3, abs=1e-3)
    names = {"step_s", "reward", "response_tokens", "lr", "entropy", "grad_norm", "loss", "spec/on", "spec/cost_s"}
    assert names <= exact.steps[6].keys()


def test_lines_that_a_buffer_held_back_get_their_own_steps_and_the_plugins_lines_too() -> None:
    run = read(DATA / "trl.log")
    assert (run.numbers, run.planned, run.remarks) == ((1, 2, 3, 4, 5, 6), 6, ())
    (notice,) = run.notices
    assert notice.step == 1 and notice.text.startswith("the self-test passed") and notice.text.count("\n") == 8


def test_a_folder_of_several_runs_has_each_with_its_checkpoints_and_event_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "flag"):
        shutil.copytree(DATA, tmp_path / name, ignore=shutil.ignore_patterns("*.log"))
    monkeypatch.setattr(build, "log_formats", lambda: FORMATS)
    made = make_report([tmp_path])
    assert [view.run.name for view in made.views] == ["flag", "plain"] and not made.problems
    assert all(len(view.run.sources) == 3 for view in made.views)


# ---- checkpoints


def test_the_newest_checkpoint_is_read_and_a_copy_that_lost_its_time_does_not_hide_it(tmp_path: Path) -> None:
    for age, step in enumerate((9, 10, 8, 2)):
        checkpoint(tmp_path, step, age=age)
    run = read(tmp_path)
    assert run.numbers == tuple(range(1, 11)) and len(run.sources) <= 3
    assert run.remarks == ("20 steps were planned, and the log ends at step 10: it is still running, or was cut off",)


def test_of_a_run_that_went_back_to_a_checkpoint_what_it_did_then_is_shown(tmp_path: Path) -> None:
    again = [{**STEPS[0], "step": n, "reward": 0.0 if n <= 4 else 1.0} for n in range(1, 8)]
    checkpoint(tmp_path, 10, [{**STEPS[0], "step": n, "reward": 0.0} for n in range(1, 11)], age=9)
    checkpoint(tmp_path, 7, again, age=0)
    run = read(tmp_path)
    assert run.series("reward").values == (0.0,) * 4 + (1.0,) * 3
    assert (
        f"{STATE}: step 5 comes again after step 10: the run was resumed there; the later one is shown" in run.remarks
    )


def test_a_checkpoint_that_was_cut_off_while_it_was_written_is_said_and_the_one_before_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, age=1)
    torn = checkpoint(tmp_path, 6)
    torn.write_text(torn.read_text()[:3000])
    run = read(tmp_path)
    assert run.numbers == (1, 2, 3, 4)
    assert any(r.startswith(f"checkpoint-6/{STATE}: it is no JSON, or was cut off") for r in run.remarks)


@pytest.mark.parametrize("text", ["[]", "{}", '{"log_history": 3}', '{"log_history": [1, {"step": "x"}]}', "[" * 9999])
def test_a_state_file_of_anything_is_a_sentence(tmp_path: Path, text: str) -> None:
    checkpoint(tmp_path, 4).write_text(text)
    with pytest.raises(ReportError, match="no step of"):
        read(tmp_path)


def test_evaluations_between_the_logged_steps_are_no_steps(tmp_path: Path) -> None:
    records = [{**STEPS[0], "step": n} for n in (10, 20, 30)]
    records[1:1] = [{"eval_loss": 0.5, "eval_reward": 1.0, "epoch": 0.2, "step": 15}]
    records.append({"train_runtime": 5.0, "train_loss": 0.1, "epoch": 0.5, "step": 32})
    checkpoint(tmp_path, 32, records, max_steps=32)
    run = read(tmp_path)
    assert run.numbers == (10, 20, 30) and not run.remarks


def test_steps_that_are_logged_one_in_ten_are_none_that_are_missing_and_count_for_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{**STEPS[0], "step": n, "step_time": 2.0, "spec/cost_so_far_s": 7.0} for n in (10, 20, 40, 50)]
    checkpoint(tmp_path, 50, records, max_steps=58)
    monkeypatch.setattr(build, "log_formats", lambda: FORMATS)
    (view,) = make_report([tmp_path]).views
    assert view.run.remarks == ("steps are missing between the first and the last: 30",)
    assert view.earned is not None and (view.earned.run_s, view.earned.cost_s) == (4 * 2.0 * 10, 7.0)
    assert ": 4 logged steps, one in 10, of TRL, " in "\n".join(to_text(make_report([tmp_path])))


@pytest.mark.parametrize(
    ("numbers", "every"),
    [
        ((), 1),
        ((7,), 1),
        ((1, 2, 3, 5), 1),
        ((10, 20), 10),
        ((1, 10, 20), 10),  # the first step is logged, too
        ((10, 20, 30, 50), 10),
        ((1, 3, 4), 1),
        ((1, 1_000_000), 1),  # two ends are no rhythm
    ],
)
def test_of_how_many_steps_one_was_logged(numbers: tuple[int, ...], every: int) -> None:
    assert spacing(numbers) == every


def test_numbers_beside_the_step_in_json_lines_are_a_step_and_rollouts_are_none(tmp_path: Path) -> None:
    lines = [json.dumps({**STEPS[0], "step": n, "note": None}) for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "completion": "2", "reward": 1.0, "loss": 1.0}\n' * 3)
    run = read(tmp_path)
    assert run.numbers == (1, 2) and run.trainer == "TRL" and run.sources == (str(tmp_path / "metrics.jsonl"),)


# ---- the console, as transformers' own callbacks and tqdm write it


Log = Callable[..., Path]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Writes a log with transformers' callbacks: with a bar or without, through a buffer or not, appended to what is there."""
    transformers = pytest.importorskip("transformers.trainer_callback")

    def write(
        last: int,
        every: int = 1,
        first: int = 0,
        bar: bool = True,
        buffered: bool = False,
        plain: bool = False,
        planned: int = 0,
        evaluated: bool = False,
    ) -> Path:
        file, per_epoch = tmp_path / "mine" / "train.log", 64
        file.parent.mkdir(exist_ok=True)
        state = SimpleNamespace(is_world_process_zero=True, is_local_process_zero=True, max_steps=planned or last)
        with (
            file.open("ab", buffering=0) as raw,
            open(raw.fileno(), "w", closefd=False, newline="", buffering=8192 if buffered else 1) as out,
            open(raw.fileno(), "w", closefd=False, newline="", buffering=1) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            callback = transformers.ProgressCallback() if bar else transformers.PrinterCallback()
            callback.on_train_begin(None, state, None)
            if bar:
                callback.training_bar.mininterval = 0  # a real step is never so short that none is drawn
            for step in range(first + 1, last + 1):
                state.global_step = step
                callback.on_step_end(None, state, None)
                if step % every == 0:
                    spec = {n: v for n, v in STEPS[0].items() if not (plain and n.startswith("spec/"))}
                    logs = {"loss": 0.5, **spec, "reward": float(step), "epoch": step / per_epoch}
                    callback.on_log(None, state, None, logs=logs)
                if step % ((1 if evaluated else 3) * every) == 0:
                    for _ in range(3 * evaluated):
                        callback.on_prediction_step(None, state, None, eval_dataloader=[0] * 3)
                    callback.on_log(None, state, None, logs={"eval_reward": 0.5, "epoch": step / per_epoch})
                    if evaluated:
                        callback.on_evaluate(None, state, None)
            callback.on_log(None, state, None, logs={"train_runtime": 3.2, "epoch": last / per_epoch})
            callback.on_train_end(None, state, None)
        return file

    return write


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("last", "every"), [(12, 1), (40, 4), (105, 10), (250, 5)])
def test_a_log_with_a_progress_bar_has_the_runs_own_steps(
    log: Log, last: int, every: int, plain: bool, buffered: bool
) -> None:
    run = read(log(last, every, plain=plain, buffered=buffered))
    assert run.numbers == tuple(range(every, last + 1, every)) and run.planned == last and not run.remarks
    assert run.series("reward").values == pytest.approx(run.numbers, rel=1e-3)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("stopped", "first"), [(30, 20), (10, 4)])
def test_a_log_of_a_run_that_was_resumed_goes_on_where_that_did(
    log: Log, stopped: int, first: int, buffered: bool
) -> None:
    log(stopped, 2, buffered=buffered, planned=60)
    run = read(log(60, 2, first=first, buffered=buffered, planned=60))
    assert run.numbers == tuple(range(2, 61, 2)) and run.series("reward").values == pytest.approx(run.numbers)
    said = f"step {first + 2} comes again after step {stopped}: the run was resumed there; the later one is shown"
    assert run.remarks == (f"train.log: {said}",)


def test_without_a_bar_the_lines_are_counted_and_that_is_said(log: Log) -> None:
    run = read(log(12, 2, bar=False))
    assert run.numbers == (1, 2, 3, 4, 5, 6) and run.planned is None
    (remark,) = run.remarks
    assert "do not say which step they are of" in remark and "They are counted" in remark


def test_without_a_bar_the_checkpoints_beside_the_log_tell_its_steps(log: Log) -> None:
    folder = log(14, 2, bar=False).parent
    records = [{**STEPS[0], "step": n, "reward": float(n), "epoch": n / 64} for n in (2, 4, 6, 8)]
    checkpoint(folder, 8, records, max_steps=14)
    run = read(folder)
    assert run.numbers == (2, 4, 6, 8, 10, 12, 14) and not run.remarks
    assert run.series("reward").values == pytest.approx(run.numbers)


@pytest.mark.parametrize("buffered", [False, True])
def test_an_evaluations_bar_is_not_the_trainings(log: Log, buffered: bool) -> None:
    run = read(log(36, 2, evaluated=True, buffered=buffered))
    assert run.numbers == tuple(range(2, 37, 2)) and run.planned == 36 and not run.remarks


def test_a_bar_is_drawn_again_with_its_step_or_late_and_not_because_an_evaluations_was_wiped_out() -> None:
    bars = [
        Bar(0, 9),
        Bar(1, 9),
        Bar(2, 3),  # an evaluation's
        Bar(3, 3, wipes=2),  # both were wiped out, and this one is drawn again first
        Bar(1, 9, wipes=2),
        Bar(3, 3, wipes=2),
        Bar(2, 9, wipes=3),  # the evaluation's has been wiped out at its end
        Bar(5, 9, wipes=4),  # late
    ]
    found = training_bars(bars)
    assert [bar.step if bar and bar.again else None for bar in found] == [None, None, None, None, 1, None, None, 5]
    assert [at for at, bar in enumerate(found) if bar is None] == [2, 3, 5] and training_bars([]) == []


def test_a_bar_in_the_middle_of_a_line_is_taken_out_of_it(tmp_path: Path) -> None:
    def again(step: int) -> str:
        return f"\r{' ' * 40}\r\r 50%|#####     | {step}/2 [00:01<00:01,  1.00it/s]"

    (tmp_path / "x.log").write_text(
        f"\r  0%|          | 0/2 [00:00<?, ?it/s]{again(1)}{{'loss': '0.5', 'rew{again(2)}ard': '1.5', 'epoch': '0.1'}}\n"
        "{'loss': 0.25, 'reward': nan, 'epoch': 0.2}\n"
    )
    run = read(tmp_path)
    assert run.steps[1]["reward"] == 1.5 and run.steps[2] == {"loss": 0.25}
    assert run.remarks == ("reward is not a finite number at step 2",)


def test_bars_without_an_end_do_not_take_for_ever(tmp_path: Path) -> None:
    bar = "\r 50%|#####     | 1/2 [00:01<00:01,  1.00it/s]"
    (tmp_path / "x.log").write_text(bar * 20_000 + "\r" + " " * 100_000 + "\r 5%|" * 20_000 + "\n{'loss': 1.0}\n")
    assert read(tmp_path).numbers == (1,)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("per_epoch", [3, 64, 1000, 40_000])
def test_epochs_of_four_digits_are_enough_for_thousands_of_steps(per_epoch: int, every: int) -> None:
    steps = list(range(every, 8000, every))
    lines = [Unnumbered({}, float(f"{step / per_epoch:.4g}"), 0, 0) for step in steps]
    found = numbered(lines, per_epoch * 1.0004)
    assert found == steps


def test_a_first_step_that_is_logged_beside_each_tenth_is_the_first() -> None:
    epochs = [1, 10, 20, 30]
    assert numbered([Unnumbered({}, step / 64, 0, 0) for step in epochs], 64.0) == epochs


def test_counted_lines_of_a_resumed_run_go_on_behind_smaller_epochs() -> None:
    epochs = [0.1, 0.2, 0.3, 0.4, 0.3, 0.4, 0.5]
    assert numbered([Unnumbered({}, epoch, 0, 0) for epoch in epochs], None) == [1, 2, 3, 4, 3, 4, 5]
    assert numbered([Unnumbered({}, None, 0, 0)] * 3, 64.0) == [1, 2, 3]


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("last", "every"), [(60, 1), (200, 10)])
def test_a_log_that_was_cut_off_anywhere_has_its_own_steps_as_far_as_it_goes(
    log: Log, last: int, every: int, buffered: bool
) -> None:
    file = log(last, every, buffered=buffered)
    whole, wrong = file.read_bytes(), []
    for share in range(20, 100, 4):
        file.write_bytes(whole[: len(whole) * share // 100])
        run = read(file)
        wrong += (
            [(share, run.numbers, run.series("reward").values)]
            if run.series("reward").values != pytest.approx(run.numbers, rel=1e-3)
            else []
        )
    assert wrong == []
