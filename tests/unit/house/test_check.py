"""The runner of the checks, on small parts of its own: what runs beside what, what is printed, and that nothing stays."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import namespaces
import pytest
from _pytest.mark.expression import Expression
from builders.paths import ROOT
from builders.waiting import wait_until
from check import PARTS, Part, parse
from parts import MINIMAL

DRIVER = """
import signal, sys
sys.path.append({tools!r})
import check
from pathlib import Path
from check import Part, main

check.NOTE_SECONDS = check.SAMPLE_SECONDS = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run where they are ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
    return subprocess.run([*command(root, *parts), *options], capture_output=True, text=True, timeout=180)


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


def children(pid: int) -> list[int]:
    """Of the process: what it started, and what it adopted."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(file.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_in_tmp(tmp_path: Path) -> Iterator[None]:
    """Remove what parts that did not pass leave where they have no /tmp of their own."""
    yield
    for link in tmp_path.glob(".cache/check/*/tmp"):
        shutil.rmtree(link.resolve(), ignore_errors=True)


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
        namespaces.user_for_namespaces(tmp_path, probe)
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
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_nothing_stays_when_the_runner_is_stopped(
    tmp_path: Path, marker: str, name: str, options: tuple[str, ...]
) -> None:
    front = start_daemons(tmp_path, marker, *options)
    front.send_signal(signal.Signals[name])
    front.communicate(timeout=20)
    assert front.returncode == (-signal.SIGKILL if name == "SIGKILL" else 128 + signal.Signals[name])
    assert wait_until(lambda: not running(marker), 20 if name == "SIGKILL" else 0)


@pytest.mark.parametrize("options", [(), ("--no-namespace",)])
def test_nothing_stays_when_the_process_that_starts_the_parts_is_killed(
    tmp_path: Path, marker: str, options: tuple[str, ...]
) -> None:
    front = start_daemons(tmp_path, marker, *options)
    (runner,) = children(front.pid)
    os.kill(runner, signal.SIGKILL)
    front.communicate(timeout=20)
    assert front.returncode == 128 + signal.SIGKILL and not running(marker)


@pytest.mark.parametrize("options", [(), ("--no-namespace",)])
def test_nothing_stays_when_the_first_process_of_a_part_is_killed(
    tmp_path: Path, marker: str, options: tuple[str, ...]
) -> None:
    front = start_daemons(tmp_path, marker, *options)
    for pid in children(children(front.pid)[0]):
        os.kill(pid, signal.SIGKILL)
    assert front.communicate(timeout=20)[0].count(b"failed (-9)") == 4, "told, and in the table"
    assert front.returncode == 1 and not running(marker)


def test_what_a_killed_first_process_leaves_is_ended_before_the_next_part(tmp_path: Path, marker: str) -> None:
    look = f'for file in /proc/[0-9]*/cmdline; do tr "\\0" "\\n" < $file | grep -qx {marker} && exit 1; done; exit 0'
    parts = [Part("a", (f"sh -c 'setsid sleep {marker} & kill -9 $PPID'",)), Part("b", (f"sh -c '{look}'",))]
    done = check(tmp_path, parts, "--jobs", "1", "--no-namespace")
    assert re.search(r"\| a +\| failed \(-9\)", done.stdout) and re.search(r"\| b +\| passed", done.stdout), done.stdout


@pytest.mark.parametrize("first_processes", [False, True])
def test_nothing_stays_when_all_of_these_are_killed_at_once(
    tmp_path: Path, marker: str, first_processes: bool, namespace: None
) -> None:
    front = start_daemons(tmp_path, marker)
    (runner,) = children(front.pid)
    for pid in [front.pid, runner, *(children(runner) if first_processes else ())]:
        with suppress(ProcessLookupError):  # the one before may have taken it along
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not running(marker))
    front.communicate()


@pytest.mark.parametrize("options", [(), ("--no-namespace",)])
def test_nothing_stays_when_make_is_killed(tmp_path: Path, marker: str, options: tuple[str, ...]) -> None:
    (tmp_path / "Makefile").write_text(f"all:\n\t@{' '.join([*command(tmp_path, *daemons(marker)), *options])}\n")
    make = subprocess.Popen(["make", "-C", str(tmp_path)], stdout=subprocess.PIPE)
    assert wait_until(lambda: len(running(marker)) == 6), "the daemons did not start"
    make.kill()
    assert b"SIGTERM: ending everything" in make.communicate(timeout=20)[0] and not running(marker)


def daemons(marker: str) -> tuple[Part, ...]:
    """Two parts, each with a process and two daemons that have left its session."""
    daemon = f"sh -c 'setsid sh -c \"sleep {marker} & sleep {marker} &\"; sleep {marker}'"
    return Part("a", (daemon,)), Part("b", (daemon,))


def start_daemons(root: Path, marker: str, *options: str) -> subprocess.Popen[bytes]:
    """A runner of them, when all are there."""
    front = subprocess.Popen([*command(root, *daemons(marker)), *options], stdout=subprocess.PIPE)
    assert wait_until(lambda: len(running(marker)) == 6), "the daemons did not start"
    return front


def test_one_run_at_a_time_has_the_folder(tmp_path: Path, marker: str) -> None:
    front = start_daemons(tmp_path, marker)
    again = check(tmp_path, [Part("a", ("true",))])
    assert again.returncode == 1 and "another run has" in again.stderr and len(running(marker)) == 6
    front.terminate()
    front.communicate(timeout=20)
    assert check(tmp_path, [Part("a", ("true",))]).returncode == 0


@pytest.mark.parametrize("options", [(), ("--no-namespace",)])
def test_what_a_part_leaves_is_ended_and_measured(tmp_path: Path, marker: str, options: tuple[str, ...]) -> None:
    (tmp_path / "burn.py").write_text(
        "import time; x = bytes([1]) * 200_000_000\n"
        "while time.process_time() < 0.7: pass\n"
        "open('burnt', 'w'); time.sleep(100)"
    )
    script = f"setsid sleep {marker} & setsid {sys.executable} -S burn.py & until [ -e burnt ]; do sleep 0.05; done"
    parts = [Part("a", (f"sh -c '{script}'",))]
    done = check(tmp_path, parts, "--memory", "0.5", *options)  # a part that needs more than there is runs alone
    assert done.returncode == 0 and not running(marker)
    wall, cpu, gigabytes = measured(done.stdout, "a")
    assert wall >= 1 and cpu >= 1 and 0.2 <= gigabytes < 0.5


def measured(text: str, part: str) -> list[float]:
    """What the table says of a part: seconds, of CPU, GB."""
    (numbers,) = re.findall(rf"^\| {part} +\| \S[^|]* \|([ 0-9.|]*)\|[^|]*\|$", text, re.M)
    return [float(number) for number in numbers.split("|")]


def test_memory_is_that_of_all_processes_of_a_part(tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(
        "import glob, os, time; x = bytes([1]) * 100_000_000; open(f'{os.getpid()}.holds', 'w')\n"
        "while len(glob.glob('*.holds')) < 4: time.sleep(0.05)\n"
        "time.sleep(2)"
    )
    done = check(tmp_path, [Part("a", (f"sh -c '{' & '.join([f'{sys.executable} hold.py'] * 4)}; wait'",))])
    assert 0.4 <= measured(done.stdout, "a")[2] < 0.6


def test_it_says_now_and_then_what_runs(tmp_path: Path) -> None:
    done = check(tmp_path, [Part("a", ("sleep 1.2",)), Part("b", ("true",))], "--jobs", "1")
    assert "running: a; waiting: 1\n" in done.stdout


def test_a_part_that_hangs_is_ended_at_its_limit_and_shows_what_ran(tmp_path: Path, marker: str) -> None:
    parts = [Part("hangs", (f"sh -c 'setsid sleep {marker} & sleep {marker}'",), limit=1.0), Part("next", ("true",))]
    done = check(tmp_path, parts, "--jobs", "1")
    assert done.returncode == 1 and not running(marker)
    assert re.search(r"\| hangs +\| failed \(124\)", done.stdout) and re.search(r"\| next +\| passed", done.stdout)
    assert "over the limit of 1 s" in done.stdout and f"sleep {marker}" in done.stdout.split("over the limit")[1]


def test_a_program_that_is_not_there_fails_its_part(tmp_path: Path) -> None:
    done = check(tmp_path, [Part("a", ("no-such-program-at-all",))])
    assert re.search(r"\| a +\| failed \(127\)", done.stdout) and "not found" in done.stdout


def test_a_part_hears_all_signals(tmp_path: Path) -> None:
    done = check(tmp_path, [Part("a", ("grep -x 'SigBlk:.0*' /proc/self/status",))])
    assert done.returncode == 0, done.stdout


def test_who_ignores_sigterm_is_killed() -> None:
    script = (
        "import os, subprocess, check, namespaces; namespaces.adopt_orphans();"
        "subprocess.Popen(['sh', '-c', 'trap : TERM; echo; while :; do sleep 0.1; done'], stdout=-1).stdout.read(1);"
        "check.end_all_below([os.getpid()], seconds=0.2); os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "tools", capture_output=True, text=True)
    assert "ChildProcessError" in done.stderr, done.stderr


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


def test_the_table_is_printed_again(tmp_path: Path) -> None:
    parts = [Part("a", ("echo === 3 passed in 1.00s ===",)), Part("b", ("true",))]
    done, again = check(tmp_path, parts), check(tmp_path, parts, "--times")
    assert again.stdout.splitlines()[0].startswith("| part ") and "3 passed" in again.stdout
    assert again.stdout.strip() in done.stdout


def test_in_the_foreground_the_arguments_reach_pytest_and_the_first_failure_ends_it(tmp_path: Path) -> None:
    parts = [Part("a", ("echo other", "echo -m pytest tests")), Part("b", ("sh -c 'exit 3'",)), Part("c", ("true",))]
    done = check(tmp_path, parts, "--foreground", "a", "b", "c", "--", "-k", "x or y")
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        *("echo other", "other", "echo -m pytest tests -k 'x or y'", "-m pytest tests -k x or y", "sh -c 'exit 3'")
    ]


def test_arguments_may_leave_a_part_without_a_test(tmp_path: Path) -> None:
    parts = [Part("a", ("sh -c 'echo $1; exit 5' pytest tests", "echo then -m pytest tests"))]
    for options in ([], ["--foreground"]):
        assert check(tmp_path, parts, *options).returncode == (5 if options else 1)
        assert check(tmp_path, parts, *options, "--", "-k", "x or y").returncode == 0
    assert log(tmp_path, "a").splitlines()[1:] == [
        "tests",
        "$ echo then -m pytest tests -k 'x or y'",
        "then -m pytest tests -k x or y",
    ]


def test_the_parts_are_listed_and_versions_are_some_of_them(tmp_path: Path) -> None:
    listed = check(tmp_path, list(PARTS), "--list").stdout
    assert all(f"{part.name}, {part.gigabytes:g} GB:\n  {part.commands[0]}\n" in listed for part in PARTS)
    versions, needs = parse(["versions"], PARTS).names, {part.name: part.needs for part in PARTS}
    assert len(versions) > 3 and all(needs[name] == [name] for name in versions)


def test_each_test_of_the_kit_is_in_a_part() -> None:
    """They are chosen by words of their names: one that none asks for would never run."""
    asked = [re.search(r"-k ('[^']+'|\S+)", c) for part in PARTS for c in part.commands if MINIMAL in c]
    words = [Expression.compile(found[1].strip("'")) for found in asked if found]
    names = re.findall(r"(?<!@pytest\.mark\.family\n)^def (test_\w+)", (ROOT / MINIMAL).read_text(), re.M)
    assert names and not [n for n in names if not any(w.evaluate(lambda part, n=n: part in n) for w in words)]


def test_an_unknown_part_is_refused_and_make_names_only_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["lin"], PARTS)
    assert "unknown part 'lin'; known: lint" in capsys.readouterr().err
    named = re.findall(r"--foreground ([a-z -]+?)(?: --|$)", (ROOT / "Makefile").read_text(), re.M)
    daily = {part.name for part in PARTS if part.daily}
    assert {name for names in named for name in names.split()} == daily - {"wheels"}


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
