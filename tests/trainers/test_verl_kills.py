"""Real verl, one of whose processes is killed -9 in each phase: the run ends, nothing of ours stays behind, and it resumes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from spec_plugin_verl_cpu.run import SMALL, SPEC, VerlRun

from spec_plugin import hookimpl
from spec_plugin.conformance.forks import server_processes
from spec_plugin.conformance.launch import RunFailed, StepMetrics
from spec_plugin.conformance.recorder import read_trace
from spec_plugin.folders import disk, memory

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import supervise

pytestmark = pytest.mark.trainer

REWARD = Path(__file__).with_name("reward.py")
VERSION = 3  # of the policy, in whose step it happens
#: what Ray calls the processes; the actor is the one in which the hooks run
VICTIMS = {"actor": "", "engine": "ray::SpecHttpServer", "trainer": "ray::TaskRunner"}
#: phase -> seconds after its hook was called
PHASES = {"rollout": 0.3, "logprobs": 0.0, "training": 0.02, "sync": 0.0, "refresh": 0.01, "saving": 0.005}
DEATH_S, EXIT_S = 180.0, 30.0  # until the run has ended; until its processes are gone


def victim(name: str) -> int:
    """The process to kill."""
    if not VICTIMS[name]:
        return os.getpid()
    siblings = psutil.Process(os.getppid()).children()  # Ray's workers have one parent; another run's have another
    found = [p.pid for p in siblings if " ".join(p.cmdline()).startswith(VICTIMS[name])]
    assert found, f"no process is called {VICTIMS[name]}"
    return found[0]


class Kills:
    """A plugin that kills a process of the run in one of its phases: ``Kills=phase:victim:folder``."""

    def __init__(self, text: str) -> None:
        self.phase, self.victim, folder = text.split(":")
        self.folder = Path(folder)
        self.version = -1

    def _at(self, phase: str) -> None:
        if phase == self.phase and self.version == VERSION:
            self.phase = ""
            pid = victim(self.victim)
            threading.Timer(PHASES[phase], self._kill, (phase, pid)).start()
            if not PHASES[phase]:
                time.sleep(0.05)

    def _kill(self, phase: str, pid: int) -> None:
        told = {"phase": phase, "victim": self.victim, "pid": pid, "time": time.time()}
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
    def spec_save(self) -> None:
        self._at("saving")


def verl(
    stage: tuple[Path, Path, Path, Path], out: Path, steps: int, *plugins: str, more: tuple[str, ...] = ()
) -> VerlRun:
    _, policy, train, val = stage
    recorder = f"spec_plugin.conformance.recorder:Recorder={out / 'trace'}"
    options = {"serve": "always", "audit": "True", "train_share": "0.5", "train_max_steps": "4", "control_share": "0.5"}
    words = [f"{SPEC}{option}={value}" for option, value in options.items()]
    words.append(f"{SPEC}plugins=[{','.join(repr(p) for p in (recorder, *plugins))}]")
    return VerlRun(policy, train, val, REWARD, out, steps, overrides=(*SMALL, *words, "trainer.save_freq=1", *more))


def follow(run: VerlRun) -> tuple[dict[int, StepMetrics], str]:
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
    return {
        p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE
    } - server_processes()


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
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.2)
    return condition()


def published(trace: Path) -> list[dict[str, Any]]:
    return [e for e in read_trace(trace) if e["hook"] == "spec_draft_weights" and e["published"]]


@pytest.mark.parametrize("name", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_process_ends_the_run_leaves_nothing_and_the_run_resumes(
    phase: str, name: str, stage: tuple[Path, Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    supervise.adopt_orphans()  # then they are found among the descendants
    before = started_here()
    metrics, failure = follow(verl(stage, tmp_path / "first", 8, f"test_verl_kills:Kills={phase}:{name}:{tmp_path}"))
    ended = time.time()
    told = json.loads((tmp_path / "killed.json").read_text())
    assert failure and max(metrics) <= VERSION + 2, "and nothing else ended it"
    assert ended - told["time"] < DEATH_S
    assert becomes(lambda: started_here() <= before, EXIT_S), [
        psutil.Process(p).cmdline() for p in started_here() - before
    ]

    left = left_behind()
    checkpoints = tmp_path / "first" / "checkpoints"
    step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoints / f'global_step_{step}'}")
    metrics, failure = follow(verl(stage, tmp_path / "second", step + 2, more=where))
    assert not failure and max(metrics) == step + 2
    assert all(m["actor/spec/failed"] == 0 and m["actor/spec/logprob_alarms"] == 0 for m in metrics.values())
    saved = json.loads((checkpoints / f"global_step_{step}/actor/spec_plugin/draft/trainer.json").read_text())
    draft = [saved["draft_version"], saved["draft_digest"]]
    assert published(tmp_path / "second" / "trace")[0]["published"] == draft, "another draft than was saved"
    assert becomes(lambda: started_here() <= before, EXIT_S)
    assert not [folder for folder in left if folder.exists()], (
        "what the killed process left behind, the next run removes"
    )
    seconds = ended - told["time"]
    print(f"{phase}, {name}: ended {seconds:.0f} s after the kill; {len(left)} folders; resumed from step {step}")
