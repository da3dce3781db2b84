"""What the tests that kill a process of a real run share: the plugin that kills it, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

import namespaces
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from spec_plugin_conformance.journal import read_trace
from spec_plugin_conformance.launch import RunFailed, StepMetrics
from spec_plugin_cpu.forks import server_processes

from draft_training import digest
from spec_plugin import hookimpl
from spec_plugin.plan.own_folders import disk, memory

#: whom to kill: the process of the hooks, Ray's driver; others by the class of their Ray actor, vLLM's in it with this
HERE, DRIVER, CORE = "", "driver", "/EngineCore"
VERSION = 3  # of the policy, in whose step it happens
#: phase -> seconds after its hook was called
PHASES: Mapping[str, float] = {
    "rollout": 0.3,
    "logprobs": 0.0,
    "training": 0.02,
    "sync": 0.0,
    "refresh": 0.01,
    "saving": 0.005,
}
#: seconds until the run has ended; until its processes are gone: Ray's agents try to tell a GCS that is gone of their raylet
DEATH_S, EXIT_S = 180.0, 150.0


def process(who: str) -> int:
    """The process to kill."""
    if who == HERE:
        return os.getpid()
    if who == DRIVER:
        jobs = ray._private.worker.global_worker.gcs_client.get_all_job_info(skip_is_running_tasks_field=True)
        return next(int(job.driver_pid) for job in jobs.values() if not job.is_dead)
    if who.endswith(CORE):
        children = psutil.Process(process(who.removesuffix(CORE))).children()
        return next(p.pid for p in children if "spawn_main" in " ".join(p.cmdline()))
    actors = [a for a in ray._private.state.actors().values() if a["State"] == "ALIVE"]
    return next(int(a["Pid"]) for a in actors if a["ActorClassName"].startswith(who))


class Kills:
    """A plugin that kills a process of the run in one of its phases: ``kills:Kills=phase:folder:who``."""

    def __init__(self, text: str) -> None:
        self.phase, folder, self.who = text.split(":", 2)
        self.folder = Path(folder)
        self.version = -1

    def _at(self, phase: str) -> None:
        if phase == self.phase and self.version == VERSION:
            self.phase = ""
            pid = process(self.who)
            threading.Timer(PHASES[phase], self._kill, (phase, pid)).start()
            if not PHASES[phase]:
                time.sleep(0.05)

    def _kill(self, phase: str, pid: int) -> None:
        told = {"phase": phase, "victim": self.who, "pid": pid, "time": time.time()}
        (self.folder / "killed.json").write_text(json.dumps(told))
        os.kill(pid, signal.SIGKILL)

    @hookimpl(tryfirst=True)
    def spec_rollout_start(self, policy_version: int) -> None:
        self.version = policy_version
        self._at("rollout")

    @hookimpl(tryfirst=True)
    def spec_check_logprobs(self) -> None:
        self._at("logprobs")

    @hookimpl(tryfirst=True)
    def spec_train_draft(self) -> None:
        self._at("training")

    @hookimpl(tryfirst=True)
    def spec_weight_sync(self) -> None:
        self._at("sync")

    @hookimpl(tryfirst=True)
    def spec_draft_weights(self) -> None:
        self._at("refresh")

    @hookimpl(tryfirst=True)
    def spec_save(self, path: Path) -> None:
        self._at("saving")


class Run(Protocol):
    """One run of a trainer."""

    def follow(self) -> Generator[tuple[int, StepMetrics], None, None]:
        """Run it and yield its steps."""


def let_runs_find_our_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of a run imports the modules of these tests, and what they import of the tools."""
    here = Path(__file__).resolve()
    found = (str(here.parent), str(here.parents[2] / "tools"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))


def prepare(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Have the runs find the plugin, and find what they leave; the processes that are there before them."""
    let_runs_find_our_plugins(monkeypatch)
    namespaces.adopt_orphans()  # then they are found among the descendants
    return started_here()


def ends(run: Run, folder: Path, before: set[int]) -> float:
    """Judge a run of which a process is killed, which says so in ``folder``: it ends by itself, and with it all it started.

    Returns:
        Seconds from the kill to its end.
    """
    metrics, failure = follow(run)
    ended = time.time()
    told = json.loads((folder / "killed.json").read_text())
    assert failure and max(metrics) <= VERSION + 2, "and nothing else ended it"
    assert ended - told["time"] < DEATH_S
    assert becomes(lambda: started_here() <= before, EXIT_S), described(started_here() - before)
    return float(ended - told["time"])


def goes_on(run: Run, last: int, trace: Path, saved: Path, dtype: torch.dtype, prefix: str, before: set[int]) -> int:
    """Judge the run that resumes: with the draft that was saved, with log-probs that are confirmed, and it clears up.

    Args:
        run: not yet started.
        last: its last step.
        trace: what its recorder writes.
        saved: what the plugins have saved in the checkpoint that it resumes from.
        dtype: of the engine.
        prefix: of the names of metrics.
        before: processes that are none of the runs'.

    Returns:
        How many folders the run before had left behind.
    """
    left, about = left_behind(), json.loads((saved / "draft/trainer.json").read_text())
    tensors = load_file(saved / "draft/draft/model.safetensors")
    draft = [
        about["draft_version"],
        digest({n: t.to(dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}),
    ]
    metrics, failure = follow(run)
    assert not failure and max(metrics) == last, failure or f"it ended at step {max(metrics)}"
    assert all(m[f"{prefix}spec/failed"] == 0 and m[f"{prefix}spec/logprob_alarms"] == 0 for m in metrics.values())
    assert published(trace)[0]["published"] == draft, "another draft than was saved"
    assert becomes(lambda: started_here() <= before, EXIT_S)
    assert not [folder for folder in left if folder.exists()], (
        "what the killed process left behind, the next run removes"
    )
    return len(left)


def follow(run: Run) -> tuple[dict[int, StepMetrics], str]:
    """Metrics by step, and why the run stopped early."""
    found: dict[int, StepMetrics] = {}
    try:
        for step, metrics in run.follow():
            found[step] = metrics
    except RunFailed as error:
        return found, str(error)
    return found, ""


def started_here() -> set[int]:
    """Processes of the runs: all that descends from this one but for the fork servers."""
    found = set()
    for p in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):  # it has just ended
            if p.status() != psutil.STATUS_ZOMBIE:
                found.add(p.pid)
            elif p.ppid() == os.getpid():
                os.waitpid(
                    p.pid, os.WNOHANG
                )  # adopted: Ray's workers take their raylet for alive until somebody does so
    return found - server_processes()


def described(pids: set[int]) -> list[list[str]]:
    """The command lines of those that are still there."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid).cmdline())
    return found


def left_behind() -> list[Path]:
    """Our folders whose process is gone, made as old as they must be before they are removed."""
    found = []
    for folder in {path for where in (memory(), disk()) for path in where.glob("spec-plugin.own.*")}:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(folder, (0, 0))
            found.append(folder)
        os.close(descriptor)
    return found


def becomes(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true in time."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.2)
    return condition()


def published(trace: Path) -> list[dict[str, Any]]:
    """The drafts that a run sent to its engines."""
    return [e for e in read_trace(trace) if e["hook"] == "spec_draft_weights" and e["published"]]
