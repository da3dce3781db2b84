"""Files that a command is pointed at: nothing hangs, nothing eats the memory, and nothing that was there is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from builders.paths import ROOT
from click.testing import CliRunner, Result
from spec_plugin_conformance.tiny import make_target

from spec_plugin import SpecConfigError
from spec_plugin.commands.cli import main
from spec_plugin.commands.terminal import visible
from spec_plugin.plan.text_files import lines_of, text_of, write_whole


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path / "pipe.jsonl"


def test_what_is_no_file_is_refused_before_it_is_opened(pipe, tmp_path):
    for path, what in ((pipe, "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(SpecConfigError, match=f"is {what}: give a file"):
            text_of(path)
    with pytest.raises(SpecConfigError, match="No such file"):
        text_of(tmp_path / "nothing")


PROJECT = ("project", "--model", "Qwen3-8B", "--card", "H100", "--acceptance", "3=2.5")


@pytest.mark.parametrize("option", ["--lengths", "--from", "--calibration"])
def test_project_does_not_wait_for_a_pipe_or_a_device_without_an_end(option, pipe):
    for path in (pipe, "/dev/zero"):
        result = run(*PROJECT, option, path)
        assert result.exit_code == 2 and "give a file" in result.output.replace("\n", " "), result.output


def test_what_does_not_fit_into_memory_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as out:
        out.truncate(1 << 40)  # a hole, which takes no room
    for read in (text_of, lambda file: next(lines_of(file))):
        with pytest.raises(SpecConfigError, match="it has more than 512 MiB"):
            read(file)


def test_lines_are_those_of_the_file(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes("\ufeffone\r\ntwo\n\nüber \xff\nlast".encode() + b"\xff")
    assert list(lines_of(file)) == ["one\n", "two\n", "\n", "über \xff\n", "last\ufffd"]


def test_on_a_full_disk_the_older_page_stays(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("older")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch("spec_plugin.plan.text_files.os.replace", full), pytest.raises(OSError, match="No space"):
        write_whole(page, "newer")
    assert page.read_text() == "older" and [f.name for f in tmp_path.iterdir()] == ["page.html"]
    write_whole(page, "newer")
    assert page.read_text() == "newer" and page.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o22) or 0o22)


def test_steps_behind_a_header_line_are_found(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "data": {"actor/spec/on": 1.0, "actor/loss": 0.5}} for i in range(30)]
    file.write_text("\n".join(map(json.dumps, [{"config": {"lr": 1e-5}, "name": "mine"}, *rows])))
    result = run("report", file, "--json")
    assert result.exit_code == 0 and len(json.loads(result.output)["runs"][0]["steps"]) == 30


def test_what_others_wrote_is_shown_and_not_obeyed(tmp_path):
    assert visible("a\tb\nü漢") == "a\tb\nü漢"
    assert visible("\x1b]0;title\x07 \x1b[2J\x9b \u202egnp") == "\\x1b]0;title\\x07 \\x1b[2J\\x9b \\u202egnp"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b[31mred\x1b]0;owned\x07"}))
    for words in (
        ("doctor", "--target", tmp_path),
        ("report", tmp_path / "\x1b[31mno"),
        (*PROJECT, "--from", "\x1b[2Jx"),
    ):
        assert "\x1b" not in run(*words).output


def test_trouble_of_this_machines_is_one_sentence(tmp_path):
    command = [sys.executable, "-c", "from spec_plugin.commands.cli import main; main()"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "options"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = f'cd {gone} && rmdir {gone} && exec "$@"'
    done = subprocess.run(
        ["bash", "-c", shell, "_", *command, "check", "verl"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_a_refused_training_leaves_nothing_behind(tmp_path):
    target = tmp_path / "target"
    make_target(target)
    rollouts = tmp_path / "one.jsonl"
    rollouts.write_text(json.dumps({"prompt": [1, 2], "response": [3, 4]}))
    result = run("train", "--target", target, "--rollouts", rollouts, "--out", tmp_path / "draft")
    assert result.exit_code == 2 and "rollouts answer one prompt" in result.output, result.output
    assert not (tmp_path / "draft.work").exists()


def test_a_picture_is_not_written_beside_the_folder_that_was_named(tmp_path):
    result = run(*PROJECT, "--out", tmp_path)
    assert result.exit_code == 2 and "is a folder: name a file in it" in result.output


def test_options_name_is_whole_in_a_pipe():
    from spec_plugin.api.config import SpecConfig

    output = run("options").output
    assert all(f"{name} " in output for name in SpecConfig.model_fields)


def test_ctrl_c_while_the_command_is_imported_ends_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [
            str(Path(sys.prefix) / "bin" / "python"),
            "-m",
            "spec_plugin.commands",
            "--help",
        ],  # one that has imported nothing
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Aborted!\n")
