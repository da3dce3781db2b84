"""Starts a trainer in its own process and follows its steps while it runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from spec_plugin_conformance.driver import RunFailed

#: quiet libraries and a patient Ray, for a trainer on a small machine
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it wants a NUMA node for each tensor parallel rank
    # on a CPU vLLM would insist on a process for the one worker, which spins on a core while it waits
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_raylet_client_connect_timeout_milliseconds": "20000",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # who is aborted says where it was
}
#: without a step; the first one of a run has imports, an engine and a self-test before it, two minutes on an idle machine
STALL_S = 1200.0
PATIENCE_S = 10.0  # for Ray's driver to write what its workers said
START_FAILURES = ("node timed out", "raylet", "GCS", "Failed to register worker")
#: trainers ask the system for a free port, close it and listen there seconds later; another process may have got it meanwhile
PORT_TAKEN = ("EADDRINUSE", "Address already in use")
PREFIX = re.compile(r"\x1b\[[\d;]*m|\((\w+ )?pid=[^)]*\) ?|\[rank\d+\]:[ ]?")  # Ray's, and torchrun's
ERROR_LINE = re.compile(r"\s*(ERROR\b|[\w.]*(Error|Exception)\b[^\w])")

StepMetrics = dict[str, float]


class Interpreter(Protocol):
    """Starts a run's processes in the place of this interpreter, such as a fork server that has imported what they need."""

    def executable(self, env: Mapping[str, str]) -> str:
        """The path to start a process with; ``env`` is that of the run."""

    def processes(self) -> set[int]:
        """Numbers of processes that it has started for itself: they are no part of a run."""


@dataclass(frozen=True)
class Launch:
    """One run of a trainer: how it is started, and where its output goes."""

    command: tuple[str, ...]
    env: dict[str, str]  # the whole environment of the process
    out: Path  # folder of the run
    steps: int  # that the run must reach
    name: str  # of the trainer, in messages
    interpreter: Interpreter | None = None  # starts its processes; None: this one, and each imports for itself
    again: Callable[[], Launch] | None = None  # the same for a second try, where something is chosen anew: a port

    @property
    def log_file(self) -> Path:
        """Everything that the trainer, Ray and vLLM print."""
        return self.out / f"{self.name}.log"


@dataclass(frozen=True)
class Steps:
    """The file to which a trainer appends its steps, and how a line of it is read."""

    file: Path
    parse: Callable[[str], tuple[int, StepMetrics] | None]  # None: the line is no step record


def follow(launch: Launch, read: Steps) -> Generator[tuple[int, StepMetrics], None, None]:
    """Run the trainer to its end and yield (step, metrics) as each step completes.

    A start that failed for the machine's sake (Ray's limit of time, a port that another process took) is tried once more; what
    it printed is kept beside the log, as ``first-….log``. What its engines had recorded for the kit before stays, which harms
    none of its checks: no step had been taken. Closing the generator stops the trainer.

    Raises:
        RunFailed: if it exits before the last step, or takes ``STALL_S`` seconds for one, or for its end.
    """
    launch.out.mkdir(parents=True, exist_ok=True)
    for attempt in (1, 2):
        done = 0
        read.file.unlink(missing_ok=True)
        for step, metrics in _follow_once(launch if attempt == 1 or launch.again is None else launch.again(), read):
            done = step
            yield step, metrics
        if done >= launch.steps:
            return
        log = launch.log_file.read_text(errors="replace")
        if done or attempt == 2 or not (ray_failed_to_start(log) or port_was_taken(log)):
            raise RunFailed(
                f"{launch.name} stopped after step {done} of {launch.steps}; {launch.log_file}:\n{relevant_lines(log)}"
            )
        launch.log_file.rename(launch.out / f"first-{launch.log_file.name}")


def ray_failed_to_start(log: str) -> bool:
    """Whether Ray missed its start limit, as it does on a loaded machine, rather than the trainer failing for a reason."""
    registered = "Failed to register worker" not in log
    started = "Started a local Ray instance" in log and registered
    return not started and any(mark in log for mark in START_FAILURES)


def port_was_taken(log: str) -> bool:
    """Whether a process of the run failed since it could not listen on the port that it had been promised.

    torch and Ray warn of ports that they then do without: what is no error does not count.
    """
    return any(mark in line for line in error_lines(log) for mark in PORT_TAKEN)


def free_port() -> int:
    """A port of this machine on which nobody listens at present.

    For trainers that would all begin with the same one, such as torchrun's and TRL's 29500, when several start at once.
    """
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def _follow_once(launch: Launch, read: Steps) -> Generator[tuple[int, StepMetrics], None, None]:
    python, *words = launch.command
    if python == sys.executable and launch.interpreter is not None:
        python = launch.interpreter.executable(launch.env)
    with launch.log_file.open("w") as log:
        process = subprocess.Popen(
            [python, *words], env=launch.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        position, moved = 0, time.monotonic()
        while True:
            running = process.poll() is None  # asked before reading, so that the last lines are not missed
            lines, position = read_lines(read.file, position)
            for line in lines:
                if record := read.parse(line):
                    yield record
                    moved = time.monotonic()
            if not running:
                return
            if time.monotonic() - moved > STALL_S:
                abort(process, launch.interpreter)
                raise RunFailed(
                    f"{launch.name} completed no step for {STALL_S:.0f} s and was aborted; {launch.log_file}:\n"
                    f"{log_tail(launch.log_file)}"
                )
            time.sleep(0.2)
    finally:
        stop(process)


def read_lines(path: Path, position: int) -> tuple[list[str], int]:
    """The complete lines of a growing file after a byte position, and the position behind them."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        complete, newline, _ = file.read().rpartition(b"\n")
    return complete.decode(errors="replace").splitlines(), position + len(complete) + len(newline)


def abort(process: subprocess.Popen[bytes], interpreter: Interpreter | None = None) -> None:
    """Abort a trainer that hangs, so that each process writes its stack to the log; Ray's driver last, since it logs for all."""
    driver = psutil.Process(process.pid)
    starters = {driver.pid, *(interpreter.processes() if interpreter is not None else ())}
    others: set[psutil.Process] = set()
    for pid in starters:
        with suppress(psutil.Error):
            others.update(psutil.Process(pid).children(recursive=True))
    for other in (*(p for p in others if p.pid not in starters), driver):
        if other == driver:
            time.sleep(PATIENCE_S)
        with suppress(psutil.Error):
            if "python" in other.name() or other.name().startswith("ray::"):
                other.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)


def log_tail(log: Path) -> str:
    """The last 300 lines of a log, where aborted processes have written their stacks."""
    lines = [plain_line(line) for line in log.read_text(errors="replace").splitlines()]
    return "\n".join([line for line in lines if line.strip() and not line.startswith("Extension modules")][-300:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a trainer with its process group; Ray's daemons and workers go down with the driver."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError):  # a launcher that died, or was killed, may leave workers behind
        os.killpg(process.pid, signal.SIGKILL)


def plain_line(line: str) -> str:
    """A line of a log without the prefix of Ray or torchrun, and without colours."""
    return PREFIX.sub("", line)


def error_lines(log: str) -> list[str]:
    """The lines of a log that say that something failed, each once, in order."""
    return list(dict.fromkeys(line.strip() for line in map(plain_line, log.splitlines()) if ERROR_LINE.match(line)))


def relevant_lines(log: str, most: int = 12) -> str:
    """The lines of a log that explain a failure.

    Returns:
        The first errors, each once, since what fails first is often the cause, and then the end of the last traceback.
    """
    lines = [line for line in map(plain_line, log.splitlines()) if line.strip()]
    errors = error_lines(log)
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    tail = lines[starts[-1] :] if starts else lines
    return "\n".join(["first errors:", *errors[:4], "", "end of the log:", *tail[-most:]])
