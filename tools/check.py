"""Run the checks of this repository side by side: ``make test``, or ``python3 tools/check.py unit lint``.

Each part has a process that ends all it started (``supervise.py``), a log, and a /tmp of its own, since verl and Ray have
fixed names there. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import supervise
from parts import PARTS, VERSIONS, Part
from supervise import Job, Outcome

ROOT = Path(__file__).resolve().parent.parent
SUPERVISOR = Path(supervise.__file__).resolve()
GB = 16.0  # of memory for all parts that run
RESULT = r"(?:passed|failed|errors?|skipped|no tests ran)"
# of pytest; with -q there is no =
CLOSING_LINE = re.compile(rf"^(?:=+ .*{RESULT}.* in [0-9.]+s.*=+|\d+ {RESULT}.* in [0-9.]+s.*)$", re.M)
NO_TESTS_RAN = 5  # pytest's exit code


def command_words(command: str, extra: Sequence[str] = ()) -> list[str]:
    """A command with the user's arguments, which are for pytest alone."""
    return shlex.split(command) + (list(extra) if " pytest " in f"{command} " else [])


def passing_codes(extra: Sequence[str]) -> list[int]:
    """Exit codes of a part that passed; the user's arguments may leave it without a test."""
    return [0, NO_TESTS_RAN] if extra else [0]


# ---- what is known after a part


@dataclass(frozen=True)
class Row:
    """One part in the table: its outcome and its log."""

    name: str
    outcome: Outcome
    log: str

    @classmethod
    def read(cls, folder: Path, told_to_stop: bool = False) -> Row:
        """From a part's folder; without a result it was killed, or told to stop before it had begun."""
        result = folder / "result.json"
        none = Outcome(128 + signal.SIGTERM, True) if told_to_stop else Outcome(-9)
        outcome = Outcome(**json.loads(result.read_text())) if result.exists() else none
        if told_to_stop and outcome.rc < 0:  # its command heard the signal before it did
            outcome = replace(outcome, rc=none.rc, stopped=True)
        return cls(folder.name, outcome, (folder / "log").read_text(errors="replace"))

    @property
    def verdict(self) -> str:
        """``passed``, ``failed (code)`` or ``stopped``."""
        if self.outcome.stopped:
            return "stopped"
        return f"failed ({self.outcome.rc})" if self.outcome.rc else "passed"

    @property
    def tests(self) -> str:
        """pytest's count in its last closing line, such as ``3 passed, 1 skipped``."""
        counts = re.findall(rf"\d+ {RESULT}", (self.closing_lines or [""])[-1])
        return ", ".join(counts)

    @property
    def closing_lines(self) -> list[str]:
        """The lines with which pytest ends, one for each call."""
        return CLOSING_LINE.findall(self.log)


def table(rows: Iterable[Row]) -> str:
    """A Markdown table of all parts, longest first, and a sentence on which dominate."""
    rows = sorted(rows, key=lambda row: -row.outcome.wall)
    lines = [("part", "result", "wall s", "CPU s", "peak GB", "tests"), ("---", "---", "---:", "---:", "---:", "---")]
    for row in rows:
        o = row.outcome
        lines.append((row.name, row.verdict, f"{o.wall:.0f}", f"{o.cpu:.0f}", f"{o.peak_gb:.1f}", row.tests))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pads = [str.rjust if rule.endswith(":") else str.ljust for rule in lines[1]]
    cells = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    wall, cpu = sum(row.outcome.wall for row in rows), sum(row.outcome.cpu for row in rows)
    longest = ", ".join(f"{row.name} {row.outcome.wall / max(wall, 1e-9):.0%}" for row in rows[:3])
    return f"{text}\n\nTogether {wall:.0f} s and {cpu:.0f} s of CPU. Most of the time: {longest}."


# ---- lanes


@dataclass
class Lanes:
    """The parts of one run: those that wait, those that run, those that are done."""

    root: Path
    folder: Path
    lanes: int
    gigabytes: float
    namespaces: Sequence[str] | None  # for which user; None: the parts share /tmp
    fail_fast: bool
    extra: Sequence[str]
    waiting: list[Part]
    running: dict[Part, subprocess.Popen[bytes]] = field(default_factory=dict)
    done: list[Row] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def run(self) -> int | None:
        """Run all; the signal that stopped it, or None. Nothing that was started is there afterwards."""
        heard = {s for s in supervise.WATCHED if signal.getsignal(s) is not signal.SIG_IGN}  # ignored by nohup, by &
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        supervise.adopt_orphans()
        try:
            return self._loop(heard)
        finally:
            supervise.sweep(supervise.SECONDS_TO_END + 3)
            for part in self.running:
                self._end(part, told_to_stop=True)

    def _loop(self, heard: set[signal.Signals]) -> int | None:
        pause = 30.0 if sys.stdout.isatty() else 60.0
        next_note = time.monotonic() + pause
        while self.waiting or self.running:
            for part in list(self.waiting):
                if self._fits(part):
                    self._begin(part)
            got = signal.sigtimedwait(heard, max(0.0, next_note - time.monotonic()))
            if got is None:
                next_note += pause
                self._say(f"running: {', '.join(part.name for part in self.running)}; waiting: {len(self.waiting)}")
            elif got.si_signo != signal.SIGCHLD:
                self._say(f"{signal.Signals(got.si_signo).name}: ending everything")
                return got.si_signo
            for part in [part for part, process in self.running.items() if process.poll() is not None]:
                del self.running[part]
                if self._end(part).outcome.rc and self.fail_fast:
                    return None
        return None

    def _fits(self, part: Part) -> bool:
        """Whether a part can start now; alone it always can."""
        if not self.running:
            return True
        needed = part.gigabytes + sum(other.gigabytes for other in self.running)
        meets = self.namespaces is None and any(part.tags & other.tags for other in self.running)
        return len(self.running) < self.lanes and needed <= self.gigabytes and not meets

    def _begin(self, part: Part) -> None:
        folder = self.folder / part.name
        folder.mkdir(parents=True, exist_ok=True)
        commands = [command_words(command, self.extra) for command in part.commands]
        private = self.namespaces is not None
        tmp = supervise.make_tmp(folder, private)
        start = [] if self.namespaces is None else supervise.namespace(self.namespaces, tmp, self.root)
        job = Job(commands, passing_codes(self.extra), str(self.root), str(folder), private, part.limit)
        self.waiting.remove(part)
        with (folder / "log").open("wb") as log:
            # From the main thread: a supervisor is told when the thread that started it ends.
            self.running[part] = subprocess.Popen(
                [*start, sys.executable, "-S", str(SUPERVISOR), json.dumps(asdict(job))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=supervise.tied_to_this_process(private),
            )
        self._say(f"{part.name} starts, {folder / 'log'}")

    def _end(self, part: Part, told_to_stop: bool = False) -> Row:
        row = Row.read(self.folder / part.name, told_to_stop)
        if row.outcome.rc == 0:
            supervise.remove_tmp(self.folder / part.name)
        self.done.append(row)
        self._say(f"{part.name} {row.verdict} after {row.outcome.wall:.0f} s")
        if row.verdict.startswith("failed"):
            print(f"----- all that {part.name} wrote:\n{row.log}\n----- end of {part.name}", flush=True)
        elif row.closing_lines:
            print(*row.closing_lines, sep="\n", flush=True)
        return row

    def _say(self, text: str) -> None:
        seconds = int(time.monotonic() - self.start)
        print(f"[{seconds // 60:3d}:{seconds % 60:02d}] {text}", flush=True)


def run_in_lanes(parts: Sequence[Part], options: argparse.Namespace, root: Path, folder: Path) -> int:
    """Run parts side by side; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = only_one(folder)
    for old in [
        path for path in folder.iterdir() if path.is_dir() and (not options.names or path.name in options.names)
    ]:
        supervise.discard(old)
    namespaces: Sequence[str] | None = None
    if not options.no_namespace:
        try:
            with TemporaryDirectory(dir=folder, prefix=".probe-") as probe:
                namespaces = supervise.user_for_namespaces(root, Path(probe))
        except OSError as error:
            print(f"check: the parts share /tmp, so verl runs never meet, since here {error}", flush=True)
    lanes = Lanes(
        root, folder, options.jobs, options.memory, namespaces, options.fail_fast, options.extra, waiting=list(parts)
    )
    got = lanes.run()
    lock.close()
    print(f"\n{table(lanes.done)}")
    print(f"It took {time.monotonic() - lanes.start:.0f} s in {options.jobs} lane{'s' * (options.jobs != 1)}.")
    for part in lanes.waiting:
        print(f"not run: {part.name}")
    if got:
        return 128 + got
    return int(bool(lanes.waiting) or any(row.outcome.rc for row in lanes.done))


def only_one(folder: Path) -> TextIO:
    """Take the lock of this folder; it is held until the returned file is closed."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"check: another run has {folder}; wait for its end")
    return lock


# ---- the command line


def run_in_foreground(parts: Sequence[Part], extra: Sequence[str], root: Path) -> int:
    """Run parts one after the other on this terminal, up to the first command that fails; the exit code."""
    for command in (command for part in parts for command in part.commands):
        print(shlex.join(command_words(command, extra)), flush=True)
        child = subprocess.Popen(command_words(command, extra), cwd=root)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears Ctrl-C too, and ends in its own way
        code = child.wait()
        signal.signal(signal.SIGINT, before)
        if code not in passing_codes(extra):
            return code if code > 0 else 128 - code
    return 0


def make_environments(parts: Sequence[Part]) -> None:
    """Bring the environments that parts need up to date; stop if one cannot be had."""
    needed = list(dict.fromkeys(name for part in parts for name in part.needs))
    if needed and (code := subprocess.run([sys.executable, ROOT / "tools" / "make_env.py", *needed]).returncode):
        sys.exit(code)


def parse(argv: Sequence[str], parts: Sequence[Part]) -> argparse.Namespace:
    """The options, with ``names`` of parts and ``extra`` arguments for pytest."""
    usage = "check.py [options] [PART …] [-- arguments for pytest]"
    names = f"parts, in the order in which they start:\n  {', '.join(part.name for part in parts)}"
    parser = argparse.ArgumentParser("check.py", usage, __doc__, names, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    cores = len(os.sched_getaffinity(0))
    daily = [part.name for part in parts if part.daily]
    add("names", nargs="*", metavar="PART", help=f"what to run, or: versions (default: {', '.join(daily)})")
    add("--rest", action="store_true", help="run all that is not run by default")
    add("-j", "--jobs", type=int, default=max(2, cores), help="most parts at a time (default: cores, at least 2)")
    add(
        "--memory",
        type=float,
        default=min(GB, physical),
        metavar="GB",
        help="for all that run (default: %(default).0f)",
    )
    add("--fail-fast", action="store_true", help="stop at the first part that fails; else all run to their end")
    add(
        "--no-namespace",
        action="store_true",
        help="give no part a /tmp of its own, only a TMPDIR; verl runs never meet",
    )
    add("--foreground", action="store_true", help="one after the other on this terminal, without logs and measurements")
    add("--list", action="store_true", help="print the parts and their commands")
    add("--times", action="store_true", help="print the table of the last run again")
    own, extra = list(argv), []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.extra = extra
    options.names = [name for given in options.names for name in (VERSIONS if given == "versions" else (given,))]
    if unknown := sorted(set(options.names) - {part.name for part in parts}):
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(part.name for part in parts)}")
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    return options


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS, root: Path = ROOT) -> int:
    """Do what the command line says; the exit code."""
    options = parse(sys.argv[1:] if argv is None else argv, parts)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, which is inherited, children end unnoticed
    folder = root / ".cache" / "check"
    if options.list:
        for part in parts:
            print(f"{part.name}, {part.gigabytes:g} GB:", *part.commands, sep="\n  ")
        return 0
    if options.times:
        done = [Row.read(result.parent) for result in folder.glob("*/result.json")]
        print(table(done) if done else "nothing was run: make test")
        return 0
    by_name = {part.name: part for part in parts}
    if options.rest:
        options.names += [part.name for part in parts if not part.daily and part.name not in options.names]
    chosen = [by_name[name] for name in options.names] or [part for part in parts if part.daily]
    try:
        make_environments(chosen)
        if options.foreground:
            return run_in_foreground(chosen, options.extra, root)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if "MAKELEVEL" in os.environ:  # make may be killed without a word
        supervise.hear_of_the_parents_death()
    return run_in_lanes([part for part in parts if part in chosen], options, root, folder)


if __name__ == "__main__":
    sys.exit(main())
