"""What ``spec-plugin report`` and ``project`` read, whoever wrote it: a line that says what to do, no traceback, no wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.bad_input import TARGET, missing, written
from click.testing import CliRunner, Result

from spec_plugin.commands.cli import main

BIG, DEEP = "1" + "0" * 400, "[" * 50_000
STEP = '{"step": 1, "data": {"spec/on": 1}}\n'
ASKED = ("project", "--model", "Qwen3-8B", "--card", "H100", "--acceptance", "3=2.8")


def invoke(*arguments: str) -> Result:
    done = CliRunner(env={"COLUMNS": "500"}).invoke(main, list(arguments))
    assert isinstance(done.exception, SystemExit | None) and "Traceback" not in done.output, done.exception
    return done


def of_step(number: str = "2", metrics: str = '{"spec/on": 1}') -> str:
    return f'{{"step": {number}, "data": {metrics}}}\n'


#: what is in a file of steps, its name, and what the report says of it
RUNS: tuple[tuple[str, str, str], ...] = (
    (
        "a metric beyond any float",
        of_step(metrics=f'{{"spec/on": 1, "spec/x": {BIG}}}'),
        "not a finite number at step 2",
    ),
    ("one far below zero", of_step(metrics=f'{{"spec/on": 1, "spec/x": -{BIG}}}'), "not a finite number at step 2"),
    ("an infinite step", of_step("1e999"), "hold no step, the first is line 2"),
    ("a step that is NaN", of_step("NaN"), "hold no step, the first is line 2"),
    ("a list for a step", of_step("[1]"), "hold no step, the first is line 2"),
    ("a step of 401 digits", of_step(BIG), "hold no step, the first is line 2"),
    ("a time for a step", of_step("1700000000000"), "hold no step, the first is line 2"),
    ("one far below zero for a step", of_step("-1700000000000"), "hold no step, the first is line 2"),
    ("a number of 5000 digits", of_step(metrics='{"spec/x": ' + "9" * 5000 + "}"), "not a finite number at step 2"),
    ("brackets without end", f"{DEEP}\n", "hold no step, the first is line 2"),
    ("a list", "[1, 2]\n", "hold no step, the first is line 2"),
    ("bytes", "\ufffd\x00\x01\n", "hold no step, the first is line 2"),
    ("a gap", of_step("1000000"), "steps are missing between the first and the last: 2, 3, 4, 5, 6, 7, 8, 9"),
)


@pytest.mark.parametrize(("line", "said"), [row[1:] for row in RUNS], ids=[row[0] for row in RUNS])
def test_a_line_that_is_no_step_is_left_out_and_said(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "run.jsonl").write_text(STEP + line)
    done = invoke("report", str(tmp_path / "run.jsonl"), "--json")
    assert done.exit_code == 0 and said in done.output, done.output
    assert json.loads(done.output)["runs"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("r.jsonl", f"{DEEP}\n".encode(), ("r.jsonl", "no step")),
        ("r.jsonl", bytes(range(256)), ("r.jsonl", "no step")),
        ("r.jsonl", b"", ("r.jsonl", "no step of a trainer is in it yet")),
        ("r.log", b"\xff" * 1000, ("r.log", "no console logs")),
        ("r.bin", b"\xff" * 1000, ("r.bin", "no step of a trainer is in it yet")),
    ],
)
def test_a_file_without_any_step_is_named(tmp_path: Path, name: str, content: bytes, parts: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(content)
    done = invoke("report", str(tmp_path / name), "--json")
    assert done.exit_code == 2 and not list(missing(done.output, *parts)), done.output


def test_a_mark_of_byte_order_is_no_part_of_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("\ufeff" + STEP)
    assert '"runs"' in invoke("report", str(tmp_path / "r.jsonl"), "--json").output


def test_folders_loops_and_nothing_are_named(tmp_path: Path) -> None:
    (loop := tmp_path / "loop").symlink_to(tmp_path / "loop")
    (around := tmp_path / "around").mkdir()
    (around / "back").symlink_to(around)
    (inside := tmp_path / "run.jsonl").mkdir()
    for place, what in (
        (loop, "no such file"),
        (around, "no step of a trainer is in it yet"),
        (inside, "no step of a trainer is in it yet"),
    ):
        done = invoke("report", str(place))
        assert done.exit_code == 2 and not list(missing(done.output, str(place), what)), done.output


def test_a_name_that_is_no_text_is_printed_escaped(tmp_path: Path) -> None:
    (run := tmp_path / "caf\udce9.jsonl").write_text(STEP)
    done = invoke("report", str(run), "--out", str(tmp_path / "page.html"))
    assert done.exit_code == 0 and "caf\\udce9: 1 steps" in done.output, done.output
    assert "caf\\udce9" in (tmp_path / "page.html").read_text()
    assert "caf\\udce9" in invoke("check", "openrlhf", "--", "--actor.model_name_or_path", "caf\udce9").output


#: an option of ``project`` that takes a file, what is in it, and what is said
FILES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("--from", of_step(metrics=f'{{"spec/acceptance_length": {BIG}}}'), ("no step of it has a metric",)),
    ("--from", f"{DEEP}\n", ("no step of a trainer is in it",)),
    ("--from", "\x00\n", ("no step of a trainer is in it",)),
    ("--calibration", DEEP, ("recursion", "a JSON list of objects")),
    ("--calibration", "[1, 2]", ("must be a mapping", "a JSON list of objects")),
    ("--calibration", "{}", ("it is no list of steps", "a JSON list of objects")),
    ("--calibration", '[{"batch": 1, "k": 0, "paused": true, "seconds": NaN, "steps": 1}]', ("no plain step",)),
    ("--calibration", '[{"batch": 0, "k": 0, "paused": true, "seconds": 0, "steps": 1}]', ("no plain step",)),
    ("--calibration", '[{"batch": 1, "k": 0, "paused": "yes", "seconds": 1, "steps": 1}]', ("a value is no number",)),
    ("--lengths", DEEP, ("recursion", "a JSON list of tokens")),
    ("--lengths", f"[{BIG}]", ("each of 1 to",)),
    ("--lengths", "[true]", ("each of 1 to",)),
    ("--lengths", "[5, NaN]", ("each of 1 to",)),
    ("--lengths", "3\ninf", ("each of 1 to",)),
    ("--lengths", "", ("each of 1 to",)),
)


@pytest.mark.parametrize(("option", "text", "parts"), FILES, ids=lambda v: str(v)[:24])
def test_a_file_for_a_projection_that_is_none_is_named(
    tmp_path: Path, option: str, text: str, parts: tuple[str, ...]
) -> None:
    (file := tmp_path / "given.jsonl").write_text(text)
    done = invoke(*ASKED, option, str(file))
    assert done.exit_code == 2 and not list(missing(done.output, str(file), *parts)), done.output


@pytest.mark.parametrize("option", ["--calibration", "--lengths"])
def test_a_folder_in_the_place_of_that_file_is_named(tmp_path: Path, option: str) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    done = invoke(*ASKED, option, str(tmp_path))
    assert done.exit_code == 2 and not list(missing(done.output, str(tmp_path), "is a folder: give a file")), (
        done.output
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--lengths", "50=nan,99=3"), ("nan", "1 to 1e+09 tokens")),
        (("--lengths", "50=10,99=inf"), ("inf", "1 to 1e+09 tokens")),
        (("--lengths", "nan=10,99=20"), ("nan", "of 0 to 100")),
        (("--lengths", "50=10,99=1e300"), ("1e+300", "1 to 1e+09 tokens")),
        (("--longest", "1e300"), ("1e+300", "below 1e+09")),
        (("--mean", "nan"), ("nan", "between 1 and")),
        (("--logprob-passes", "-1"), ("--logprob-passes -1", "at least 0")),
        (("--prompt", "-1"), ("--prompt -1", "at least 0")),
        (("--draft-share", "nan"), ("--draft-share nan", "from 0 to 1")),
        (("--acceptance", "5=nan"), ("--acceptance 5=nan", "1 to 6")),
        (("--batch", "1" + "0" * 12), ("--batch 1000000000000", "at most 65536")),
        (("--card", "\udce9"), ("card '\\udce9'", "known are")),
        (("--model", "x" * 5000), ("model 'xxx", "neither known nor a folder")),
    ],
    ids=lambda v: " ".join(v)[:40],
)
def test_an_option_of_a_projection_that_cannot_be_is_named(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    done = invoke(*ASKED, *arguments)
    assert done.exit_code == 2 and not list(missing(done.output, *parts)), done.output
    assert len(done.output) < 700


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({**TARGET, "vocab_size": 10**400}, ("vocab_size=1000", "no model has that many")),
        ({**TARGET, "head_dim": 10**400}, ("head_dim=1000", "no model has that many")),
        ({**TARGET, "vocab_size": "64"}, ("lacks vocab_size",)),
        ({**TARGET, "num_key_value_heads": -8}, ("num_key_value_heads=-8", "above 0")),
        ({**TARGET, "num_key_value_heads": 3}, ("num_attention_heads=4 is no multiple of num_key_value_heads=3",)),
        ({**TARGET, "intermediate_size": "48"}, ("intermediate_size='48'", "above 0")),
        ({**TARGET, "head_dim": 2.5}, ("head_dim=2.5", "above 0")),
        ({**TARGET, "num_experts": 8, "num_experts_per_tok": 64}, ("64 experts a token", "of 8")),
        ({**TARGET, "num_experts": -4}, ("num_experts=-4", "above 0")),
        ({**TARGET, "hidden_size": 1}, ("hidden_size=1 is less than head_dim=32",)),
        ('{"a": ' + DEEP, ("nested too deeply",)),
        ("\ufeff{}", ("BOM", "copy it again")),
        ("", ("it is no JSON",)),
    ],
    ids=lambda v: str(v)[:24],
)
def test_a_model_whose_config_json_is_none_is_named(tmp_path: Path, config: Any, parts: tuple[str, ...]) -> None:
    folder = written(tmp_path / "model", config)
    done = invoke("project", "--model", str(folder), "--card", "H100", "--acceptance", "3=2")
    assert done.exit_code == 2 and not list(missing(done.output, "model", *parts)), done.output


def test_times_of_a_run_that_cannot_be_are_not_taken(tmp_path: Path) -> None:
    sizes = {"perf/total_num_tokens": 1e308, "prompt_length/mean": 0, "timing_s/gen": 1}
    lengths = {"response_length/mean": 1e-300, "response_length/max": 1e308}
    ours = {"spec/acceptance_length": 2.0, "spec/acceptance_pos_0": 0.5}
    (file := tmp_path / "run.jsonl").write_text(json.dumps({"step": 1, "data": {**sizes, **lengths, **ours}}))
    done = invoke("project", "--model", "Qwen3-8B", "--card", "H100", "--from", str(file))
    assert done.exit_code == 0 and "1.5" in done.output, done.output
