from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from builders.paths import ROOT
from builders.report import DATA

from spec_plugin.commands.adapters import ADAPTER_GROUP
from spec_plugin.commands.report import formats
from spec_plugin.commands.report.build import make_report
from spec_plugin.commands.report.formats import LogFormat, log_formats
from spec_plugin.commands.report.places import ReportError, find_places
from spec_plugin.commands.report.read import read_place
from spec_plugin.commands.report.run import LoggedRun

FORMATS = [LogFormat.model_validate_json(file.read_text()) for file in sorted((ROOT / "adapters").rglob("log.json"))]


def read(path: Path) -> LoggedRun:
    (place,) = find_places(path, FORMATS)
    return read_place(place, FORMATS)


def lines(folder: str) -> list[str]:
    return (DATA / folder / "metrics.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "mine" / "metrics.jsonl"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def test_every_adapter_says_how_its_trainer_writes_down_steps(monkeypatch):
    ours = ("openrlhf", "verl", "trl", "nothing_at_all")
    entries = {name: metadata.EntryPoint(name, f"spec_plugin_{name}", ADAPTER_GROUP) for name in ours}
    monkeypatch.setattr(formats, "installed_adapters", lambda: entries)
    assert sorted(form.trainer for form in log_formats()) == ["OpenRLHF", "TRL", "verl"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "verl.log"])
def test_what_was_packed_is_read_like_what_was_not(tmp_path, name):
    with gzip.open(tmp_path / f"{name}.gz", "wt") as packed:
        packed.write((DATA / "verl-flag" / name).read_text())
    unpacked = read(DATA / "verl-flag" / name)
    for path in (tmp_path, tmp_path / f"{name}.gz"):
        assert read(path).steps == unpacked.steps and read(path).notices == unpacked.notices


@pytest.mark.parametrize(("kept", "steps"), [(1500, 3), (8, 0), (0, 0)])
def test_a_packed_file_that_was_cut_off_is_read_up_to_there_and_that_is_said(tmp_path, kept, steps):
    whole = gzip.compress("".join(lines("verl-flag")).encode())
    (tmp_path / "metrics.jsonl.gz").write_bytes(whole[:kept])
    if steps:
        run = read(tmp_path)
        assert len(run.numbers) >= steps and any("compressed data is broken or cut off" in r for r in run.remarks)
    else:
        with pytest.raises(ReportError, match="broken or cut off" if kept else "is empty"):
            read(tmp_path)


def test_what_is_packed_in_name_only_is_said_to_be(tmp_path):
    (tmp_path / "train.log.gz").write_text("step:1 - actor/lr:1.0\n")
    with pytest.raises(ReportError, match=r"compressed data is broken or cut off.*Not a gzipped file"):
        read(tmp_path)


@pytest.mark.parametrize("value", ["NaN", "nan", "Infinity", "-Infinity", "inf"])
def test_what_a_logger_writes_for_no_number_is_none_and_is_named(file, value):
    records = [json.loads(line) for line in lines("verl-flag")]
    records[3]["data"]["actor/entropy"] = value
    records[4]["data"]["note"] = "warm-up"
    run = read(write(file, "".join(json.dumps(record) + "\n" for record in records)))
    assert "entropy is not a finite number at step 4" in run.remarks and "entropy" not in run.steps[4]
    assert len(run.remarks) == 1


def test_a_time_below_zero_is_none_and_is_named(file):
    """A clock that was set back; what is earned may be below zero."""
    records = [json.loads(line) for line in lines("verl-flag")]
    earned = {"actor/spec/saved_s": -2.0, "actor/spec/net_so_far_s": -2.0}
    records[3]["data"] |= {"timing_s/step": -5.0, "actor/spec/train_ms": -1.0, **earned}
    run = read(write(file, "".join(json.dumps(record) + "\n" for record in records)))
    values = run.steps[4]
    assert "step_s" not in values and "spec/train_ms" not in values
    assert values["spec/saved_s"] == values["spec/net_so_far_s"] == -2.0
    assert {"step_s is a time below zero at step 4", "spec/train_ms is a time below zero at step 4"} == set(run.remarks)


def test_a_misspelt_name_in_a_log_format_is_refused():
    text = (ROOT / "adapters/spec_plugin_verl/log.json").read_text()
    assert LogFormat.model_validate_json(text).trainer == "verl"
    with pytest.raises(ValueError, match="steps_s"):
        LogFormat.model_validate_json(text.replace('"step_s"', '"steps_s"'))


def test_the_console_log_says_the_same_as_the_json_lines():
    from_json, from_log = read(DATA / "verl-flag/metrics.jsonl"), read(DATA / "verl-flag/verl.log")
    assert from_json.trainer == from_log.trainer == "verl"
    assert from_log.numbers == from_json.numbers == tuple(range(1, 9))
    for step in from_json.numbers:
        assert from_log.steps[step] == pytest.approx(from_json.steps[step], rel=1e-5)


@pytest.mark.parametrize(
    ("events", "other", "steps"),
    [("verl-events", "verl-flag/metrics.jsonl", 8), ("openrlhf-events", "openrlhf-partial/openrlhf.log", 10)],
)
def test_tensorboards_files_say_the_same_as_what_else_was_logged(events, other, steps):
    found, expected = read(DATA / events), read(DATA / other)
    assert found.trainer == expected.trainer and found.numbers == tuple(range(1, steps + 1))
    for step in found.numbers:
        assert found.steps[step] == pytest.approx(expected.steps[step], rel=1e-6)


def test_an_event_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    whole = (DATA / "verl-events/events.out.tfevents.1").read_bytes()
    cut = tmp_path / "events.out.tfevents.1"
    cut.write_bytes(whole[: int(len(whole) * 0.66)])
    run = read(cut)
    assert run.numbers == (1, 2, 3, 4, 5, 6) and run.steps[5]["spec/on"] == 1
    record, step = run.remarks
    assert record == "events.out.tfevents.1: a record after step 6 is broken or cut off, and it was read up to there"
    assert step.startswith("step 6 has ") and step.endswith("it was cut off")


@pytest.mark.parametrize("size", [12, 13, 20, 40, 5000])
def test_an_event_file_of_anything_is_read_or_said(tmp_path, size):
    whole = (DATA / "verl-events/events.out.tfevents.1").read_bytes()
    for text in (whole[:size], random.Random(size).randbytes(size), whole[:2000] + random.Random(size).randbytes(size)):
        (tmp_path / "events.out.tfevents.1").write_bytes(text)
        try:
            assert read(tmp_path).remarks
        except ReportError as error:
            assert "no step" in str(error)


def test_an_event_file_without_tensorboard_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ReportError, match=r"pip install 'spec-plugin\[report\]', or name the console log instead"):
        read(DATA / "verl-events")


def test_a_log_and_the_event_files_in_a_folder_below_are_one_run(tmp_path):
    shutil.copytree(DATA / "openrlhf-events", tmp_path / "mine" / "tensorboard")
    shutil.copy(DATA / "openrlhf-partial/openrlhf.log", tmp_path / "mine")
    run = read(tmp_path / "mine")
    assert run.name == "mine" and len(run.sources) == 2 and run.notices


def test_json_lines_are_preferred_to_the_log_and_complete_it(file):
    write(file, lines("verl-flag")[1].replace('"timing_s/step":', '"timing_s/step":77.5,"x":'))
    (file.parent / "verl.log").write_text((DATA / "verl-flag/verl.log").read_text())
    run = read(file.parent)
    assert run.numbers == tuple(range(1, 9)) and run.steps[2]["step_s"] == 77.5 and run.steps[3]["step_s"] < 77


def test_several_names_of_the_trainer_that_are_one_for_the_report_are_added_up(file):
    run = read(write(file, lines("verl-plain")[0].replace('"timing_s/adv":', '"timing_s/ref":100.0,"timing_s/adv":')))
    assert run.steps[1]["logprobs_s"] == pytest.approx(100 + read(DATA / "verl-plain").steps[1]["logprobs_s"])


def test_names_are_the_reports_own_whatever_the_trainer():
    for folder in ("verl-flag", "openrlhf-failed"):
        names = read(DATA / folder).steps[5].keys()
        assert {
            "step_s",
            "generation_s",
            "update_s",
            "sync_s",
            "reward",
            "lr",
            "ms_per_token",
            "spec/on",
            "spec/k_b1",
        } <= names


def test_generation_per_token_is_computed_where_the_trainer_does_not_log_it():
    values = read(DATA / "openrlhf-failed").steps[2]
    tokens = values["response_tokens"] * values["samples"]
    assert values["ms_per_token"] == pytest.approx(1e3 * values["generation_s"] / tokens)


def test_the_plugins_lines_have_the_step_in_which_they_were_printed():
    run = read(DATA / "verl-flag")
    said = {(n.step, n.text.partition(" (")[0].partition(" in ")[0]) for n in run.notices}
    assert (1, "the self-test passed") in said
    assert (3, "policy version 3: k=8 for batch size 1, k=6 for 2-4, k=8 from 5") in said
    first = next(n for n in run.notices if n.step == 1)
    assert first.text.count("\n") == 7 and "break-even: batch size" in first.text  # its indented lines


def test_a_plain_run_has_no_metric_of_the_plugin():
    assert not read(DATA / "verl-plain").has_plugin


def test_a_line_that_was_cut_off_is_left_out_and_said(file):
    whole = lines("verl-flag")
    run = read(write(file, "".join(whole[:4]) + whole[4][:300]))
    assert run.numbers == (1, 2, 3, 4)
    assert run.remarks == ("metrics.jsonl: its last line, 5, is cut off in the middle and was left out",)


def test_a_run_cut_off_in_its_first_line_is_a_sentence(file):
    with pytest.raises(ReportError, match=r"no step .* its last line, 1, is cut off in the middle"):
        read(write(file, lines("verl-flag")[0][:200]))


def test_a_run_that_ended_early_is_said(tmp_path):
    text = (DATA / "verl-flag/verl.log").read_text()
    log = tmp_path / "verl.log"
    log.write_text(text[: text.index("step:6 -")])
    assert "8 steps were planned, and the log ends at step 5: it is still running, or was cut off" in read(log).remarks


def test_an_empty_file_is_said(file):
    with pytest.raises(ReportError, match=r"metrics\.jsonl is empty: the run has written nothing yet"):
        read(write(file, ""))


def test_a_broken_log_is_said_and_does_not_raise_anything_else(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(os.urandom(4096) + b"\nstep: - \nGlobal step x: {}\n")
    with pytest.raises(ReportError, match=r"train.log: no step of OpenRLHF or TRL or verl is in it"):
        read(log)


def test_broken_lines_among_whole_ones_are_counted(file):
    whole = lines("verl-plain")
    run = read(write(file, whole[0] + "Traceback\n" + '{"step": 2, "data": 3}\n' + whole[1]))
    assert run.numbers == (1, 2)
    assert run.remarks == ("metrics.jsonl: 2 of its lines hold no step, the first is line 2",)


def test_a_run_that_was_stopped_before_its_first_step_says_by_what(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("(WorkerDict pid=1) spec_plugin.errors.LosslessError: the engine does not sample from the policy\n")
    with pytest.raises(ReportError, match="stopped before its first step: LosslessError: the engine does not sample"):
        read(log)


def test_of_a_resumed_run_the_later_steps_are_shown(file):
    whole = lines("verl-plain")
    again = json.loads(whole[2])
    again["data"]["timing_s/step"] = 77.0
    run = read(write(file, "".join(whole[:5]) + json.dumps(again) + "\n"))
    assert run.numbers == (1, 2, 3) and run.steps[3]["step_s"] == 77.0
    assert run.remarks == (
        "metrics.jsonl: step 3 comes again after step 5: the run was resumed there; the later one is shown",
    )


def test_a_resumed_run_may_have_several_files_and_a_copy_is_none(tmp_path):
    def log(name: str, first: int, last: int, speed: float, age: int) -> None:
        file = tmp_path / name
        file.write_text("".join(f"step:{s} - timing_s/step:{speed} - actor/lr:1e-06\n" for s in range(first, last + 1)))
        os.utime(file, (age, age))

    log("old.log", 1, 8, 20.0, 1)
    log("copy.log", 1, 8, 20.0, 2)
    assert read(tmp_path).remarks == ()
    log("new.log", 6, 7, 10.0, 3)
    run = read(tmp_path)
    assert run.series("step_s").values == (20.0,) * 5 + (10.0,) * 2
    assert run.remarks == (
        "new.log: step 6 comes again after step 8: the run was resumed there; the later one is shown",
    )


def test_missing_steps_and_numbers_that_are_none_are_said(file):
    whole = lines("verl-plain")
    broken = whole[3].replace('"actor/grad_norm":', '"actor/grad_norm":NaN,"x":')
    run = read(write(file, whole[0] + whole[2] + broken))
    assert run.remarks == (
        "grad_norm is not a finite number at step 4",
        "steps are missing between the first and the last: 2",
    )
    assert "grad_norm" not in run.steps[4]


def test_a_folder_of_several_runs_is_several_runs_and_what_is_no_run_is_no_news(tmp_path):
    for name in ("plain", "flag"):
        write(tmp_path / name / "metrics.jsonl", lines("verl-plain")[0])
    write(tmp_path / "flag" / "0.jsonl", '{"input": "1+1", "output": "2", "score": 1, "step": 1}\n')
    write(tmp_path / "ray" / "x.log", "nothing\n")
    made = make_report([tmp_path])
    assert [view.run.name for view in made.views] == ["flag", "plain"] and not made.problems
    assert made.views[0].run.sources == (str(tmp_path / "flag" / "metrics.jsonl"),)


def test_json_lines_named_by_experiment_are_runs_of_their_own(tmp_path):
    for name in ("first", "second"):
        write(tmp_path / f"{name}.jsonl", lines("verl-plain")[0])
    assert [place.name for place in find_places(tmp_path, FORMATS)] == [
        f"{tmp_path.name}/first",
        f"{tmp_path.name}/second",
    ]


def test_runs_of_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        write(
            tmp_path / name / "out" / "metrics.jsonl" if (tmp_path / name).mkdir() is None else tmp_path,
            lines("verl-plain")[0],
        )
    made = make_report([tmp_path / "a" / "out", tmp_path / "b" / "out"])
    assert [view.run.name for view in made.views] == ["a/out", "b/out"]


def test_a_file_in_this_folder_is_called_like_the_folder(file, monkeypatch):
    monkeypatch.chdir(write(file, lines("verl-plain")[0]).parent)
    assert read(Path("metrics.jsonl")).name == read(Path(".")).name == "mine"


@pytest.mark.parametrize("what", ["nowhere", "."])
def test_nothing_to_read_is_a_sentence(tmp_path, what):
    with pytest.raises(ReportError, match=r"there is no such file|no trainer's output is in this folder"):
        make_report([tmp_path / what])
