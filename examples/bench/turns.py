"""Two or more runs of a trainer, step by step in turn: while one works all processes of the others are stopped.

Whole steps are compared so that what the machine does meets all of them alike: the n-th step of each begins when that of the run
before it has ended. A run is stopped (SIGSTOP) as soon as its step is logged, when its next one has hardly begun, and what it
was stopped for is no part of its time; but a run that is woken takes longer for its next step, so a turn may be several steps,
of which the first one is told apart (``Step.woken``). Each run has a /tmp of its own where the kernel allows it, since verl and
Ray have fixed names there.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # so that this file is found by path, from anywhere

import namespaces  # noqa: E402
from spec_plugin_conformance.launch import Launch, StepMetrics, Steps, log_tail, read_lines, stop  # noqa: E402

#: seconds without a step after which a run is given up; the first step has imports, an engine and a self-test before it
STALL_S, LOOK_S = 1200.0, 0.02


class TurnsError(RuntimeError):
    """A run ended, or stood still, before its last step."""


@dataclass(frozen=True)
class Step:
    """One step of one run."""

    number: int
    metrics: StepMetrics  # as the trainer logged them
    took_s: (
        float  # from the end of the step before to this one's, without what the run was stopped for; NaN of a first one
    )
    stopped_s: float  # what it was stopped for meanwhile
    ended_s: float = math.nan  # since its run began, without what it was stopped for; of a first step alone

    @property
    def woken(self) -> bool:
        """Was the run stopped behind the step before, for more than a moment: its processes wake, and timers have run out."""
        return self.stopped_s > 1.0

    def part(self, name: str) -> float:
        """One of the times that the trainer logged, of a part of the step: less the stop, if that fell into it.

        A run is stopped between two steps: the first part of the next one may have begun, or not. A part that is longer than all
        of its step has the stop in it.
        """
        seconds = self.metrics[name]
        return seconds - self.stopped_s if seconds > self.took_s else seconds


@dataclass
class Contestant:
    """One of the runs."""

    name: str
    launch: Launch
    records: Steps
    again: Launch | None = None  # after it was killed; None: as it began
    steps: list[Step] = field(default_factory=list)
    memory_gb: float = 0.0  # most of all its processes at the end of a step, shared pages in each
    _known: list[psutil.Process] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _position: int = 0
    _stopped_since: float | None = None
    _stopped_s: float = 0.0
    _last: float = math.nan  # when the last step ended
    _began: float = math.nan
    _ready: list[tuple[int, StepMetrics]] = field(default_factory=list)

    def start(self, private: Path | None) -> None:
        """Begin, or begin again.

        Args:
            private: a folder that takes the place of its /tmp; None: it shares that of the machine.
        """
        launch = self.again if self.steps and self.again is not None else self.launch
        launch.out.mkdir(parents=True, exist_ok=True)
        if self.records.file.exists():
            self.records.file.replace(self.records.file.with_suffix(f".before-{len(self.steps)}"))
        self._position = 0
        inside = [] if private is None else _own_tmp(private)
        self._began = time.monotonic()
        # unshare ignores SIGTERM; the kernel ends the namespace with it
        by = signal.SIGKILL if inside else signal.SIGTERM
        with launch.log_file.open("a" if self.steps else "w") as log:
            self._process = subprocess.Popen(
                [*inside, *launch.command],
                env=launch.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(namespaces.die_with_the_parent, by),  # a stopped trainer outlives nobody
            )

    def _all(self) -> list[psutil.Process]:
        assert self._process is not None
        with suppress(psutil.Error):
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def _send(self, number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)

    def stop(self) -> None:
        """Stop all of it: what is known of it at once, then what it has started since, and what that was just starting."""
        self._stopped_since = time.monotonic()
        self._send(signal.SIGSTOP, self._known)
        for _ in range(2):
            self._known = self._all()
            self._send(signal.SIGSTOP, self._known)
        memory = 0.0
        for process in self._known:
            with suppress(psutil.Error):
                memory += process.memory_info().rss / 2**30
        self.memory_gb = max(self.memory_gb, memory)

    def go(self) -> None:
        """Let it go on."""
        self._send(signal.SIGCONT, self._known)
        if self._stopped_since is not None:
            self._stopped_s += time.monotonic() - self._stopped_since
            self._stopped_since = None

    def kill(self) -> None:
        """End all of it at once, as a machine that dies."""
        assert self._process is not None
        self._send(signal.SIGKILL, self._all())
        self._process.wait()
        self._stopped_since, self._stopped_s, self._last = None, 0.0, math.nan

    def end(self) -> None:
        """Stop it for good, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self.go()
            stop(self._process)

    def next_step(self) -> Step:
        """Wait until one more step is logged.

        Raises:
            TurnsError: if none comes.
        """
        assert self._process is not None
        began = time.monotonic()
        while not self._ready:
            running = self._process.poll() is None  # asked before reading, so that the last lines are not missed
            lines, self._position = read_lines(self.records.file, self._position)
            self._ready += [record for line in lines if (record := self.records.parse(line))]
            if not self._ready and (not running or time.monotonic() - began > STALL_S):
                why = "made no step" if running else f"ended with exit status {self._process.returncode}"
                raise TurnsError(
                    f"{self.name} {why} behind step {len(self.steps)}:\n{log_tail(self.launch.log_file)[-4000:]}"
                )
            time.sleep(0 if self._ready else LOOK_S)
        now = time.monotonic()
        ended = math.nan if self.steps else now - self._began
        step = Step(*self._ready.pop(0), now - self._last - self._stopped_s, self._stopped_s, ended)
        self._stopped_s, self._last = 0.0, now
        return step


def _own_tmp(private: Path) -> list[str]:
    """The beginning of a command with a /tmp of its own; empty where the kernel does not allow that."""
    try:
        user = namespaces.user_for_namespaces(ROOT, Path(tempfile.mkdtemp(prefix="spec-turns-")))
    except OSError:
        return []
    return namespaces.inside(user, private, ROOT)


def in_turns(
    runs: Sequence[Contestant],
    steps: int,
    out: Path,
    kill_at: int | None = None,
    said: Callable[[str], None] = print,
    each: int = 1,
) -> Iterator[int]:
    """Run them to their last step; yields the number of the last step that all have made, behind each round.

    Args:
        runs: the first one of a round changes from round to round.
        steps: of each.
        out: folder for their folders of temporary files.
        kill_at: the step behind which those that have ``again`` are killed, to go on from their last checkpoint; steps that they
            make once more take the place of the first ones.
        said: gets a line at what takes long.
        each: steps of a turn; the first round is one step, and one ends at ``kill_at``.

    Raises:
        TurnsError: if one of them fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    os.environ["SPEC_BENCH_OUT"] = str(
        out.resolve()
    )  # folders that a variable names are seen behind a /tmp of one's own, too
    with ExitStack() as stack:
        for run in runs:
            stack.callback(run.end)
        for run in runs:
            said(f"{run.name}: starts")
            run.start(out / f"tmp-{run.name}")
            _add(run, run.next_step())
            run.stop()
        yield 1
        done = 1
        for turn, last in enumerate(_ends(steps, each, kill_at)):
            first = turn % len(runs)
            for run in (*runs[first:], *runs[:first]):
                run.go()
                if kill_at == done and run.again is not None:
                    said(f"{run.name}: killed behind step {done}, goes on from its last checkpoint")
                    run.kill()
                    run.start(out / f"tmp-{run.name}")
                while len(run.steps) < last or run.steps[-1].number < last:
                    _add(run, run.next_step())
                if last < steps:
                    run.stop()
            done = last
            yield done


def _ends(steps: int, each: int, kill_at: int | None) -> list[int]:
    """The last step of each turn behind the first step."""
    ends = set(range(1 + each, steps, each)) | {steps}
    return sorted(end for end in ends | {kill_at or steps} if 1 < end <= steps)


def _add(run: Contestant, step: Step) -> None:
    run.steps = [s for s in run.steps if s.number < step.number] + [step]


class BusyLoop:
    """One process that computes for some seconds and sleeps for some, as a neighbour on the machine."""

    def __init__(self, on_s: float, off_s: float) -> None:
        code = (
            "import time\n"
            f"while True:\n until = time.monotonic() + {on_s}\n while time.monotonic() < until: pass\n time.sleep({off_s})\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], env=dict(os.environ), preexec_fn=namespaces.die_with_the_parent
        )

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()
