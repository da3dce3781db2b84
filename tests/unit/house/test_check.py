"""The runner of the checks, on small parts of its own: what runs beside what, what is printed, and that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import supervise
from builders.paths import ROOT
from check import PARTS, Part, Row, parse

DRIVER = """
import signal, sys
sys.path.append({tools!r})
from pathlib import Path
from check import Part, main

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run where it is ignored
sys.exit(main(sys.argv[1:], {parts!r}, Path({root!r})))
"""
# Only one at a time can have the folder.
ALONE = "sh -c 'mkdir taken && sleep 0.2 && rmdir taken'"
#: waits for ten seconds at most for another one of its kind, and then gets in its way
MEETING = (
    "sh -c 'mktemp here-XXXXXX; for i in $(seq 100); do set -- here-*; [ $# = 2 ] && break; sleep 0.1; done; "
    "[ $# = 2 ] && mkdir taken'"
)
VERL = frozenset({"verl"})


def command(root: Path, *parts: Part) -> list[str]:
    driver = root / "driver.py"
    driver.write_text(DRIVER.format(tools=str(ROOT / "tools"), parts=parts, root=str(root)))
    return [sys.executable, "-S", str(driver)]


def check(root: Path, parts: list[Part], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command(root, *parts), *options], capture_output=True, text=True, timeout=60)


def log(root: Path, name: str) -> str:
    return (root / ".cache" / "check" / name / "log").read_text()


def running(marker: str) -> list[int]:
    """Processes with that word among their arguments."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def supervisors(root: Path) -> list[int]:
    """Processes of ``supervise.py`` for parts in that folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *arguments = file.read_text(errors="replace").split("\0")
            if program == sys.executable and any(word.endswith("supervise.py") for word in arguments):
                found += [int(file.parent.name)] * any(str(root) in word for word in arguments)
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """An argument for ``sleep`` that no other process has."""
    word = f"31415.{os.getpid()}{time.monotonic_ns()}"
    yield word
    for pid in running(word):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def namespace(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.mkdir()
    try:
        supervise.user_for_namespaces(tmp_path, probe)
    except OSError as reason:
        pytest.skip(f"no namespaces here: {reason}")


def test_parts_run_side_by_side(tmp_path: Path) -> None:
    def meet(mine: str, other: str) -> str:
        return f"sh -c 'touch {mine}; for i in $(seq 200); do [ -e {other} ] && exit 0; sleep 0.05; done; exit 1'"

    done = check(tmp_path, [Part("a", (meet("a", "b"),)), Part("b", (meet("b", "a"),))], "--jobs", "2")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "options", [("--jobs", "1"), ("--jobs", "2", "--memory", "16"), ("--jobs", "2", "--no-namespace", "--memory", "99")]
)
def test_parts_that_must_not_meet_run_one_after_the_other(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = check(tmp_path, [Part(name, (ALONE,), gigabytes=10, tags=VERL) for name in "ab"], *options)
    assert done.returncode == 0, done.stdout


def test_parts_with_a_tmp_of_their_own_may_meet(tmp_path: Path, namespace: None) -> None:
    done = check(tmp_path, [Part(name, (MEETING,), tags=VERL) for name in "ab"], "--jobs", "2")
    assert done.returncode == 1 and "File exists" in done.stdout


def test_all_that_a_failed_part_wrote_is_printed_and_of_the_others_pytests_closing_lines(tmp_path: Path) -> None:
    good, bad = "===== 12 passed, 1 skipped in 3.40s =====", "=== 1 failed, 2 passed in 70.10s (0:01:10) ==="
    parts = [
        Part("bad", (f"echo early {bad!r}", f"printf 'detail\\n{bad}\\n'", "false", "echo never")),
        Part("good", (f"printf 'chatter\\n{good}\\n'",)),
        Part("quiet", ("printf 'chatter\\n16 passed in 3.00s\\n'",)),
    ]
    done = check(tmp_path, parts, "--jobs", "1")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and not done.stderr
    assert {"detail", good, bad, "16 passed in 3.00s"} <= set(lines) and not {"chatter", "never"} & set(lines)
    assert re.search(r"\| bad +\| failed \(1\) .* 1 failed, 2 passed +\|", done.stdout)
    assert re.search(r"\| good +\| passed .* 12 passed, 1 skipped +\|", done.stdout)
    (pattern,) = re.findall(r"^grep -aE '(.*?)'", (ROOT / ".ci" / "run").read_text(), re.M)
    assert [line for line in lines if re.search(pattern, line)] == [bad, good]


def test_fail_fast_stops_the_others(tmp_path: Path, marker: str) -> None:
    parts = [Part("long", (f"sleep {marker}",)), Part("bad", ("false",)), Part("later", ("true",))]
    done = check(tmp_path, parts, "--jobs", "2", "--fail-fast")
    assert done.returncode == 1 and not running(marker)
    assert re.search(r"\| long +\| stopped", done.stdout) and "not run: later" in done.stdout


@pytest.mark.parametrize("options", [(), ("--no-namespace",)])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_stays_when_the_runner_is_stopped(
    tmp_path: Path, marker: str, name: str, options: tuple[str, ...]
) -> None:
    front = start_daemons(tmp_path, marker, *options)
    front.send_signal(signal.Signals[name])
    front.communicate(timeout=20)
    assert front.returncode == (-signal.SIGKILL if name == "SIGKILL" else 128 + signal.Signals[name])
    assert wait_until(lambda: not running(marker), 20 if name == "SIGKILL" else 0)


@pytest.mark.parametrize("options", [(), ("--no-namespace",)])
def test_nothing_stays_when_a_supervisor_is_killed(tmp_path: Path, marker: str, options: tuple[str, ...]) -> None:
    front = start_daemons(tmp_path, marker, *options)
    for pid in supervisors(tmp_path):
        os.kill(pid, signal.SIGKILL)
    assert b"failed (-9)" in front.communicate(timeout=20)[0]
    assert front.returncode == 1 and not running(marker)


def test_nothing_stays_when_the_runner_and_all_supervisors_are_killed_at_once(
    tmp_path: Path, marker: str, namespace: None
) -> None:
    front = start_daemons(tmp_path, marker)
    for pid in [front.pid, *supervisors(tmp_path)]:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not running(marker))
    front.communicate()


def start_daemons(root: Path, marker: str, *options: str) -> subprocess.Popen[bytes]:
    """A runner of two parts, each with a process and two daemons that have left its session."""
    daemon = f"sh -c 'setsid sh -c \"sleep {marker} & sleep {marker} &\"; sleep {marker}'"
    parts = Part("a", (daemon,)), Part("b", (daemon,))
    front = subprocess.Popen([*command(root, *parts), *options], stdout=subprocess.PIPE)
    assert wait_until(lambda: len(running(marker)) == 6), "the daemons did not start"
    return front


def test_what_a_part_leaves_is_ended_and_measured(tmp_path: Path, marker: str) -> None:
    burn = "x = bytes([1]) * 200_000_000; sum(range(10_000_000)); open('burnt', 'w'); import time; time.sleep(100)"
    (tmp_path / "burn.py").write_text(burn)
    script = f"setsid sleep {marker} & setsid {sys.executable} burn.py & until [ -e burnt ]; do sleep 0.05; done"
    parts = [Part("a", (f"sh -c '{script}'",))]
    done = check(tmp_path, parts, "--memory", "0.5")  # a part that needs more than there is runs alone
    assert done.returncode == 0 and not running(marker)
    result = json.loads((tmp_path / ".cache" / "check" / "a" / "result.json").read_text())
    assert result["left"] == 2 and result["cpu"] > 0.1 and 0.2 < result["peak_gb"] < 0.5 and result["wall"] > 0.1


def test_a_part_that_hangs_is_ended_at_its_limit_and_shows_what_ran(tmp_path: Path, marker: str) -> None:
    parts = [Part("hangs", (f"sh -c 'setsid sleep {marker} & sleep {marker}'",), limit=1.0), Part("next", ("true",))]
    done = check(tmp_path, parts, "--jobs", "1")
    assert done.returncode == 1 and not running(marker)
    assert re.search(r"\| hangs +\| failed \(124\)", done.stdout) and re.search(r"\| next +\| passed", done.stdout)
    assert "over the limit of 1 s" in done.stdout and f"sleep {marker}" in done.stdout.split("over the limit")[1]


def test_a_program_that_is_not_there_fails_its_part(tmp_path: Path) -> None:
    done = check(tmp_path, [Part("a", ("no-such-program-at-all",))])
    assert re.search(r"\| a +\| failed \(127\)", done.stdout) and "No such file" in done.stdout


def test_who_ignores_sigterm_is_killed() -> None:
    script = (
        "import subprocess, supervise, time; supervise.adopt_orphans();"
        "subprocess.Popen(['sh', '-c', 'trap : TERM; echo; while :; do sleep 0.1; done'], stdout=-1).stdout.read(1);"
        "print(supervise.sweep(0.2) >= 1, supervise.collect())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "tools", capture_output=True, text=True)
    assert done.stdout.split() == ["True", "None"], done.stderr


def test_each_part_has_a_tmp_of_its_own_and_sees_the_checkout(tmp_path: Path, namespace: None) -> None:
    name = f"{tmp_path.name}-{time.monotonic_ns()}"
    (tmp_path / "here.txt").write_text("the checkout\n")
    script = f"cat {tmp_path}/here.txt here.txt; ls /tmp; mkdir /tmp/{name}; echo T=$TMPDIR; exec {sys.executable} -V"
    done = check(tmp_path, [Part("a", (f"sh -c '{script}'",)), Part("b", (f"sh -c '{script}'",))], "--jobs", "1")
    assert done.returncode == 0, done.stdout
    for part in "ab":
        text = log(tmp_path, part).partition("\n")[2]
        assert text.count("the checkout") == 2 and name not in text and "T=\n" in text
        assert not (tmp_path / ".cache" / "check" / part / "tmp").exists()
    assert not Path("/tmp", name).exists() and (tmp_path / "here.txt").exists()


def test_without_a_namespace_each_part_has_a_short_tmpdir(tmp_path: Path) -> None:
    script = "echo $TMPDIR; touch $TMPDIR/file; [ $TMPDIR = $RAY_TMPDIR ]"
    parts = [Part("good", (f"sh -c '{script}'",)), Part("bad", (f"sh -c '{script}; false'",))]
    check(tmp_path, parts, "--no-namespace")
    folders = {name: Path(log(tmp_path, name).splitlines()[1]) for name in ("good", "bad")}
    assert len(set(folders.values())) == 2 and all(len(str(folder)) < 30 for folder in folders.values())
    assert not folders["good"].exists() and (folders["bad"] / "file").exists()
    check(tmp_path, parts, "--no-namespace")
    assert not folders["bad"].exists(), "the next run removes it"
    supervise.discard(tmp_path / ".cache" / "check" / "bad")


def test_the_table_is_printed_again(tmp_path: Path) -> None:
    parts = [Part("a", ("echo === 3 passed in 1.00s ===",)), Part("b", ("true",))]
    done, again = check(tmp_path, parts), check(tmp_path, parts, "--times")
    assert again.stdout.splitlines()[0].startswith("| part ") and "3 passed" in again.stdout
    assert again.stdout.strip() in done.stdout
    assert Row.read(tmp_path / ".cache" / "check" / "a").tests == "3 passed"


def test_in_the_foreground_the_arguments_reach_pytest_and_the_first_failure_ends_it(tmp_path: Path) -> None:
    parts = [Part("a", ("echo other", "echo -m pytest tests")), Part("b", ("sh -c 'exit 3'",)), Part("c", ("true",))]
    done = check(tmp_path, parts, "--foreground", "a", "b", "c", "--", "-k", "x or y")
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        *("echo other", "other", "echo -m pytest tests -k 'x or y'", "-m pytest tests -k x or y", "sh -c 'exit 3'")
    ]


def test_an_unknown_part_is_refused_and_make_names_only_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["lin"], PARTS)
    assert "unknown part 'lin'; known: lint" in capsys.readouterr().err
    named = re.findall(r"--foreground ([a-z -]+?)(?: --|$)", (ROOT / "Makefile").read_text(), re.M)
    daily = {part.name for part in PARTS if part.daily}
    assert {name for names in named for name in names.split()} == daily - {"shapes", "wheels"}  # those by SHAPES=…


def test_shapes_run_when_they_are_asked_for(tmp_path: Path) -> None:
    parts = [Part("a", ("true",)), Part("rare", ("true",), daily=False)]
    for options, ran in (([], {"a"}), (["--rest"], {"rare"}), (["rare"], {"rare"}), (["a", "--rest"], {"a", "rare"})):
        done = check(tmp_path, parts, *options)
        assert set(re.findall(r"^\| (\w+) +\| passed", done.stdout, re.M)) == ran, done.stdout


def test_before_a_commit_and_on_a_hosted_runner_the_same_is_run():
    lint = next(part.commands for part in PARTS if part.name == "lint")
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert tuple(hooks) == lint
    runs = re.findall(r"- run: make (\S+)(?: SHAPES=(\S+))?", (ROOT / ".github/workflows/checks.yml").read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"lint", "unit", "conformance"} <= {target for target, _ in runs} <= targets
    assert {shape for _, shape in runs} - {""} <= {part.name for part in PARTS}
