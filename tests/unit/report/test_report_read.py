from __future__ import annotations

import json
import os
import random
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
from spec_plugin.commands.report.read import ReportError, read_runs
from spec_plugin.commands.report.run import LoggedRun

FORMATS = [LogFormat.model_validate_json(file.read_text()) for file in sorted((ROOT / "adapters").rglob("log.json"))]


def read(path: Path) -> LoggedRun:
    (run,) = read_runs(path, FORMATS)
    return run


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_a_logger_writes_for_no_number_is_none_and_is_named(file, value):
    records = [json.loads(line) for line in lines("verl-flag")]
    records[3]["data"]["actor/entropy"] = value
    records[4]["data"]["note"] = "warm-up"
    run = read(write(file, "".join(json.dumps(record) + "\n" for record in records)))
    assert "entropy is not a finite number at step 4" in run.remarks and "entropy" not in run.steps[4]
    assert len(run.remarks) == 1


def test_a_misspelt_name_in_a_log_format_is_refused():
    text = (ROOT / "adapters/spec_plugin_verl/log.json").read_text()
    assert LogFormat.model_validate_json(text).trainer == "verl"
    with pytest.raises(ValueError, match="steps_s"):
        LogFormat.model_validate_json(text.replace('"step_s"', '"steps_s"'))


def test_tensorboards_files_say_the_same_as_the_json_lines():
    found, expected = read(DATA / "verl-events"), read(DATA / "verl-flag/metrics.jsonl")
    assert found.trainer == expected.trainer and found.numbers == tuple(range(1, 9))
    for step in found.numbers:
        assert found.steps[step] == pytest.approx(expected.steps[step], rel=1e-6)


def test_of_a_trainer_that_does_not_log_generation_per_token_it_is_computed():
    values = read(DATA / "openrlhf-events").steps[2]
    tokens = values["response_tokens"] * values["samples"]
    assert values["ms_per_token"] == pytest.approx(1e3 * values["generation_s"] / tokens)
    assert {"step_s", "generation_s", "reward", "lr", "ms_per_token", "spec/on", "spec/k_b1"} <= values.keys()


def test_event_files_of_a_run_that_was_resumed_are_one_run_and_a_copy_adds_nothing(tmp_path):
    whole = (DATA / "verl-events/events.out.tfevents.1").read_bytes()
    for age, name in enumerate(("1", "2")):
        (tmp_path / f"events.out.tfevents.{name}").write_bytes(whole)
        os.utime(tmp_path / f"events.out.tfevents.{name}", (age, age))
    run = read(tmp_path)
    assert run.steps == read(DATA / "verl-events").steps and run.remarks == () and len(run.sources) == 2


def test_an_event_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    whole = (DATA / "verl-events/events.out.tfevents.1").read_bytes()
    cut = tmp_path / "events.out.tfevents.1"
    cut.write_bytes(whole[: int(len(whole) * 0.66)])
    run = read(cut)
    assert run.numbers == (1, 2, 3, 4, 5, 6) and run.steps[5]["spec/on"] == 1
    assert run.remarks == (
        "events.out.tfevents.1: a record after step 6 is broken or cut off, and it was read up to there",
    )


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
    with pytest.raises(ReportError, match="pip install tensorboard"):
        read(DATA / "verl-events")


def test_a_plain_run_has_no_metric_of_the_plugin():
    assert not read(DATA / "verl-plain").has_plugin


def test_a_line_that_was_cut_off_is_left_out_and_said(file):
    whole = lines("verl-flag")
    run = read(write(file, "".join(whole[:4]) + whole[4][:300]))
    assert run.numbers == (1, 2, 3, 4)
    assert run.remarks == ("metrics.jsonl: 1 of its lines are cut off or hold no step, the first is line 5",)


def test_a_run_cut_off_in_its_first_line_is_a_sentence(file):
    with pytest.raises(
        ReportError, match=r"no step .* 1 of its lines are cut off or hold no step, the first is line 1"
    ):
        read(write(file, lines("verl-flag")[0][:200]))


def test_an_empty_file_is_said(file):
    with pytest.raises(ReportError, match=r"metrics\.jsonl: no step of a trainer is in it yet"):
        read(write(file, ""))


def test_broken_lines_among_whole_ones_are_counted(file):
    whole = lines("verl-plain")
    run = read(write(file, whole[0] + "Traceback\n" + '{"step": 2, "data": 3}\n' + whole[1]))
    assert run.numbers == (1, 2)
    assert run.remarks == ("metrics.jsonl: 2 of its lines are cut off or hold no step, the first is line 2",)


def test_of_a_resumed_run_the_later_steps_are_shown(file):
    whole = lines("verl-plain")
    again = json.loads(whole[2])
    again["data"]["timing_s/step"] = 77.0
    run = read(write(file, "".join(whole[:5]) + json.dumps(again) + "\n"))
    assert run.numbers == (1, 2, 3) and run.steps[3]["step_s"] == 77.0


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
    assert [run.name for run in made.runs] == ["flag", "plain"] and not made.problems
    assert made.runs[0].sources == (str(tmp_path / "flag" / "metrics.jsonl"),)


def test_runs_of_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        write(
            tmp_path / name / "out" / "metrics.jsonl" if (tmp_path / name).mkdir() is None else tmp_path,
            lines("verl-plain")[0],
        )
    made = make_report([tmp_path / "a" / "out", tmp_path / "b" / "out"])
    assert [run.name for run in made.runs] == [f"out ({tmp_path / name / 'out'})" for name in ("a", "b")]


def test_a_file_in_this_folder_is_called_like_the_folder(file, monkeypatch):
    monkeypatch.chdir(write(file, lines("verl-plain")[0]).parent)
    assert read(Path("metrics.jsonl")).name == read(Path(".")).name == "mine"


def test_json_lines_named_by_experiment_are_runs_of_their_own(tmp_path):
    for name in ("first", "second"):
        write(tmp_path / f"{name}.jsonl", lines("verl-plain")[0])
    assert [run.name for run in read_runs(tmp_path, FORMATS)] == ["first", "second"]


@pytest.mark.parametrize("name", ["train.log", "nohup.txt", "metrics.jsonl.gz", "weights.safetensors"])
def test_of_a_file_that_is_none_of_steps_it_is_said_what_to_log_instead(tmp_path, name):
    (tmp_path / name).write_text("step:1 - actor/lr:1.0\n")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ReportError) as refused:
            read(path)
        text = str(refused.value)
        assert text.startswith(f"{path}: no step of a trainer is in it yet") and "\n" not in text
        for option in ('trainer.logger=\'["console","file"]\'', "--logger.tensorboard_dir", "report_to=tensorboard"):
            assert option in text
        assert "JSON lines of steps (*.jsonl), checkpoint-*/trainer_state.json, TensorBoard's event files" in text
        assert "no console logs" in text


@pytest.mark.parametrize("what", ["nowhere", "."])
def test_nothing_to_read_is_a_sentence(tmp_path, what):
    with pytest.raises(ReportError, match=r"there is no such file|no step of a trainer is in it yet"):
        make_report([tmp_path / what])
