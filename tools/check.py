"""Run the checks of this repository side by side: ``make test``, or ``python3 tools/check.py unit lint``.

Each part has a log and, where the system lets it, a /tmp of its own (``namespaces.py``), since verl and Ray have fixed names in
there; nothing that it started is left when it has ended. Linux, util-linux and the standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import namespaces
from parts import PARTS, VERSIONS, Part

ROOT = Path(__file__).resolve().parent.parent
FIRST_PROCESS = ROOT / "tools" / "first_process.sh"
GB = 16.0  # of memory for all parts that run
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
SECONDS_TO_END = 5.0  # between SIGTERM and SIGKILL
LOOK_SECONDS, SAMPLE_SECONDS, NOTE_SECONDS = 0.5, 15.0, 60.0
RESULT = r"(?:passed|failed|errors?|skipped|no tests ran)"
# of pytest; with -q there is no =
CLOSING_LINE = re.compile(rf"^(?:=+ .*{RESULT}.* in [0-9.]+s.*=+|\d+ {RESULT}.* in [0-9.]+s.*)$", re.M)
NO_TESTS_RAN, OVERTIME = 5, 124  # exit codes of pytest, and of timeout(1)


# ---- processes

# All that a part starts descends from its first process, that of a PID namespace or, where the kernel keeps those from us, a
# subreaper: daemons leave their session and their parent, but an orphan comes back to the nearest subreaper among its ancestors.
# So what a first process leaves comes to the runner, and what the runner leaves to the process that waits for it.


def descendants(ancestors: Collection[int], but: Collection[int] = ()) -> list[int]:
    """Process ids of all children, their children, and so on; without those in ``but``, and theirs."""
    children: dict[str, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it may have ended meanwhile
            parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(parent, []).append(int(pid))
    found = list(ancestors)
    for ancestor in found:
        found += [child for child in children.get(str(ancestor), ()) if child not in but]
    return found[len(ancestors) :]


def gigabytes(pid: int) -> float:
    """Memory of a process, its share of what it shares; 0 if it has ended."""
    for file in ("smaps_rollup", "status"):
        with suppress(OSError):
            if kilobytes := re.search(r"^(?:Pss|VmRSS):\s+(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.M):
                return int(kilobytes[1]) * 1024 / 1e9
    return 0.0


def end_all_below(ancestors: Collection[int], but: Collection[int] = (), seconds: float = SECONDS_TO_END) -> None:
    """End all descendants, with SIGKILL those that SIGTERM does not end in that time.

    None of this process's own is missed: each is its child, or has an ancestor that stays its child until it is waited for here.
    """
    deadline, told = time.monotonic() + seconds, set[int]()
    while found := descendants(ancestors, but):
        late = time.monotonic() > deadline
        for pid in found:
            with suppress(ProcessLookupError, ChildProcessError):
                if late or pid not in told:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                os.waitpid(pid, os.WNOHANG)
        told.update(found)
        time.sleep(0.02)


def go_on_in_a_child(heard: set[signal.Signals]) -> None:
    """Return in a child. This process waits for its end, and ends what it leaves; the child is told when this one ends."""
    sys.stdout.flush()
    parent, child = os.getpid(), os.fork()
    namespaces.adopt_orphans()
    if not child:
        namespaces.die_with_the_parent(signal.SIGTERM)
        return None if os.getppid() == parent else sys.exit(1)  # it died before it could be heard
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if (number := signal.sigwait(heard)) != signal.SIGCHLD:
            os.kill(child, number)
    end_all_below([parent])
    code = os.waitstatus_to_exitcode(ended[1])
    sys.exit(code if code >= 0 else 128 - code)


# ---- lanes


@dataclass(eq=False)
class Run:
    """A part that runs, or ran."""

    part: Part
    log: Path
    process: subprocess.Popen[bytes]  # the first one
    begun: float = field(default_factory=time.monotonic)
    verdict: str = ""  # ``passed``, ``failed (code)``, or ``stopped`` before its end; none while it is left to itself
    wall: float = 0.0  # seconds
    cpu: float = 0.0  # seconds, of all its processes
    peak_gb: float = 0.0  # most memory of all its processes at a time, in samples, or of one of them
    tests: str = ""  # pytest's count in its last closing line, such as ``3 passed, 1 skipped``

    def sample(self) -> None:
        """Measure its memory."""
        self.peak_gb = max(self.peak_gb, sum(map(gigabytes, descendants([self.process.pid]))))

    def run_out(self) -> None:
        """Say what there is at the limit: a hang is found by the processes that it leaves, and by what they last wrote."""
        self.verdict = f"failed ({OVERTIME})"
        with self.log.open("a") as log:
            print(f"\ncheck: over the limit of {self.part.limit:.0f} s, with these processes:", file=log)
            for pid in descendants([self.process.pid]):
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                    print(f"  {pid} {' '.join(words)[:160]}", file=log)


def table(runs: Iterable[Run]) -> str:
    """A Markdown table of all parts, longest first, and a sentence on which dominate."""
    runs = sorted(runs, key=lambda run: -run.wall)
    lines = [("part", "result", "wall s", "CPU s", "peak GB", "tests"), ("---", "---", "---:", "---:", "---:", "---")]
    lines += [(r.part.name, r.verdict, f"{r.wall:.0f}", f"{r.cpu:.0f}", f"{r.peak_gb:.1f}", r.tests) for r in runs]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pads = [str.rjust if rule.endswith(":") else str.ljust for rule in lines[1]]
    cells = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    wall, cpu = sum(run.wall for run in runs), sum(run.cpu for run in runs)
    longest = ", ".join(f"{run.part.name} {run.wall / max(wall, 1e-9):.0%}" for run in runs[:3])
    return f"{text}\n\nTogether {wall:.0f} s and {cpu:.0f} s of CPU. Most of the time: {longest}."


@dataclass
class Lanes:
    """The parts of one run: those that wait, those that run, those that are done."""

    root: Path
    folder: Path
    options: argparse.Namespace
    user: Sequence[str] | None  # of the namespaces; None: the parts share /tmp
    waiting: list[Part]
    running: list[Run] = field(default_factory=list)
    done: list[Run] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    stopping: bool = False  # nothing more is started

    def run(self, heard: set[signal.Signals]) -> int:
        """Run all; the signal that stopped it, or 0. Nothing that was started is there afterwards."""
        stopped_by, next_sample, next_note = 0, self.start, self.start + NOTE_SECONDS
        while self._begin_what_fits():
            got = signal.sigtimedwait(heard, LOOK_SECONDS)
            if got and got.si_signo != signal.SIGCHLD and not stopped_by:
                stopped_by, self.stopping = got.si_signo, True
                self._say(f"{signal.Signals(stopped_by).name}: ending everything")
            for run in list(self.running):
                self._collect(run)
            now = time.monotonic()
            if self.running and now >= next_sample:
                for run in self.running:
                    run.sample()
                age = now - self.running[-1].begun
                next_sample = now + min(SAMPLE_SECONDS, age / 2)  # short parts are sampled, too
            for run in self.running:
                if self.stopping:
                    run.verdict = run.verdict or "stopped"
                elif now > run.begun + run.part.limit and not run.verdict:
                    run.run_out()
            if told := [run.process.pid for run in self.running if run.verdict]:
                end_all_below(told)
            if now >= next_note:
                next_note += NOTE_SECONDS
                self._say(f"running: {', '.join(run.part.name for run in self.running)}; waiting: {len(self.waiting)}")
        return stopped_by

    def _begin_what_fits(self) -> bool:
        """Start what can start now; whether anything runs."""
        for part in [] if self.stopping else list(self.waiting):
            others = [run.part for run in self.running]
            needed = part.gigabytes + sum(other.gigabytes for other in others)
            meets = self.user is None and any(part.tags & other.tags for other in others)
            if not others or (len(others) < self.options.jobs and needed <= self.options.memory and not meets):
                self.waiting.remove(part)
                self._begin(part, self.folder / part.name)
        return bool(self.running)

    def _begin(self, part: Part, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in namespaces.TMP_VARIABLES}
        if self.user is None:
            tmp = tempfile.mkdtemp(prefix="part-", dir=namespaces.TMP)  # short enough for sockets
            (folder / "tmp").symlink_to(tmp)
            environment |= {"TMPDIR": tmp, "RAY_TMPDIR": tmp}
        start = [] if self.user is None else namespaces.inside(self.user, folder / "tmp", self.root)
        commands = [shlex.join(command_words(command, self.options.extra)) for command in part.commands]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*start, "sh", FIRST_PROCESS, str(self.options.passes), *commands],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=environment,
                start_new_session=True,
                preexec_fn=_before_the_first_process,
            )
        self.running.append(Run(part, folder / "log", process))
        self._say(f"{part.name} starts, {folder / 'log'}")

    def _collect(self, run: Run) -> None:
        """Note and tell what a part did, if it has ended; what it left has ended then, too."""
        ended, status, usage = os.wait4(run.process.pid, os.WNOHANG)
        if not ended:
            return
        self.running.remove(run)
        end_all_below([os.getpid()], but=[other.process.pid for other in self.running])
        run.wall, run.cpu = time.monotonic() - run.begun, usage.ru_utime + usage.ru_stime
        run.process.returncode = code = os.waitstatus_to_exitcode(status)
        run.verdict = run.verdict or (f"failed ({code})" if code else "passed")
        run.peak_gb = max(run.peak_gb, usage.ru_maxrss * 1024 / 1e9)
        text = run.log.read_text(errors="replace")
        closing_lines = CLOSING_LINE.findall(text)
        run.tests = ", ".join(re.findall(rf"\d+ {RESULT}", (closing_lines or [""])[-1]))
        self.done.append(run)
        (self.folder / "table").write_text(table(self.done))
        self._say(f"{run.part.name} {run.verdict} after {run.wall:.0f} s")
        if run.verdict.startswith("failed"):
            print(f"----- all that {run.part.name} wrote:\n{text}\n----- end of {run.part.name}", flush=True)
            self.stopping |= self.options.fail_fast
        elif closing_lines:
            print(*closing_lines, sep="\n", flush=True)
        if run.verdict == "passed":
            shutil.rmtree((run.log.parent / "tmp").resolve(), ignore_errors=True)

    def _say(self, text: str) -> None:
        seconds = int(time.monotonic() - self.start)
        print(f"[{seconds // 60:3d}:{seconds % 60:02d}] {text}", flush=True)


def _before_the_first_process() -> None:
    namespaces.die_with_the_parent()
    namespaces.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run_in_lanes(parts: Sequence[Part], options: argparse.Namespace, root: Path, folder: Path) -> int:
    """Run parts side by side; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(
        folder / ".lock", os.O_WRONLY | os.O_CREAT
    )  # until this process has ended, and the one that it goes on in
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"check: another run has {folder}; wait for its end")
    heard = {number for number in WATCHED if signal.getsignal(number) is not signal.SIG_IGN}  # ignored by nohup, by &
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    go_on_in_a_child(heard)
    for old in folder.iterdir():
        if old.is_dir() and (not options.names or old.name in options.names):
            shutil.rmtree((old / "tmp").resolve(), ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    user: Sequence[str] | None = None
    if not options.no_namespace:
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as probe:
                user = namespaces.user_for_namespaces(root, Path(probe))
        except OSError as error:
            print(f"check: the parts share /tmp, so verl runs never meet, since here {error}", flush=True)
    lanes = Lanes(root, folder, options, user, list(parts))
    stopped_by = lanes.run(heard)
    print(f"\n{table(lanes.done)}")
    print(f"It took {time.monotonic() - lanes.start:.0f} s in {options.jobs} lane{'s' * (options.jobs != 1)}.")
    for part in lanes.waiting:
        print(f"not run: {part.name}")
    return 128 + stopped_by if stopped_by else int(lanes.stopping or any(run.verdict != "passed" for run in lanes.done))


# ---- the command line


def command_words(command: str, extra: Sequence[str]) -> list[str]:
    """A command with the user's arguments, which are for pytest alone."""
    return shlex.split(command) + (list(extra) if " pytest " in f"{command} " else [])


def run_in_foreground(parts: Sequence[Part], options: argparse.Namespace, root: Path) -> int:
    """Run parts one after the other on this terminal, up to the first command that fails; the exit code."""
    for words in (command_words(command, options.extra) for part in parts for command in part.commands):
        print(shlex.join(words), flush=True)
        child = subprocess.Popen(words, cwd=root)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears Ctrl-C too, and ends in its own way
        code = child.wait()
        signal.signal(signal.SIGINT, before)
        if code not in (0, options.passes):
            return code if code > 0 else 128 - code
    return 0


def parse(argv: Sequence[str], parts: Sequence[Part]) -> argparse.Namespace:
    """The options; ``names`` of parts, ``extra`` arguments for pytest, and the exit code that ``passes`` beside 0."""
    usage = "check.py [options] [PART …] [-- arguments for pytest]"
    names = f"parts, in the order in which they start:\n  {', '.join(part.name for part in parts)}"
    parser = argparse.ArgumentParser("check.py", usage, __doc__, names, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    memory = min(GB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9)
    cores = max(2, len(os.sched_getaffinity(0)))
    daily = ", ".join(part.name for part in parts if part.daily)
    add("names", nargs="*", metavar="PART", help=f"what to run, or: versions (default: {daily})")
    add("--rest", action="store_true", help="run all that is not run by default")
    add("-j", "--jobs", type=int, default=cores, help="most parts at a time (default: cores, at least 2)")
    add("--memory", type=float, default=memory, metavar="GB", help="for all that run (default: %(default).0f)")
    add("--fail-fast", action="store_true", help="stop at the first part that fails; else all run to their end")
    add("--no-namespace", action="store_true", help="no /tmp for each part, but a TMPDIR; verl runs never meet")
    add("--foreground", action="store_true", help="one after the other on this terminal, without logs and measurements")
    add("--list", action="store_true", help="print the parts and their commands")
    add("--times", action="store_true", help="print the table of the last run again")
    end = [*argv, "--"].index("--")
    options = parser.parse_args(argv[:end])
    options.extra = argv[end + 1 :]
    options.passes = NO_TESTS_RAN if options.extra else 0  # the user's arguments may leave a part without a test
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
        print((folder / "table").read_text() if (folder / "table").exists() else "nothing was run: make test")
        return 0
    if options.rest:
        options.names += [part.name for part in parts if not part.daily and part.name not in options.names]
    by_name = {part.name: part for part in parts}
    chosen = [by_name[name] for name in options.names] or [part for part in parts if part.daily]
    needed = list(dict.fromkeys(name for part in chosen for name in part.needs))
    try:
        if needed and (code := subprocess.run([sys.executable, ROOT / "tools/make_env.py", *needed]).returncode):
            return code
        if options.foreground:
            return run_in_foreground(chosen, options, root)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if "MAKELEVEL" in os.environ:  # make may be killed without a word
        namespaces.die_with_the_parent(signal.SIGTERM)
    return run_in_lanes([part for part in parts if part in chosen], options, root, folder)


if __name__ == "__main__":
    sys.exit(main())
