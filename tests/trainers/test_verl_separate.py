"""Real verl with engines apart from the actor, in trouble: a late actor, one that dies in a refresh, an engine that is wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import kills
import pytest
from spec_plugin_conformance.journal import read_trace
from spec_plugin_verl_cpu.run import SEPARATE, SMALL, SPEC, VerlRun

from spec_plugin import hookimpl
from spec_plugin.api.events import WeightSync

pytestmark = pytest.mark.trainer

REWARD = Path(__file__).with_name("reward.py")
UNREPAIRED = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={spec_plugin:{skip_patches:[expand_kernel]}}"
)
LATE, LATE_S, DIES = 3, 20.0, 6


class Late:
    """A plugin that takes long at one weight sync."""

    @hookimpl
    def spec_weight_sync(self, event: WeightSync) -> None:
        if event.policy_version == LATE:
            time.sleep(LATE_S)


class Dies:
    """A plugin that kills the actor in the middle of a refresh."""

    @hookimpl
    def spec_draft_weights(self, event: WeightSync) -> None:
        if event.policy_version == DIES:
            threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


def verl(
    stage: tuple[Path, Path, Path, Path], name: str, steps: int, *plugins: str, more: tuple[str, ...] = ()
) -> VerlRun:
    root, policy, train, val = stage
    recorder = f"spec_plugin_conformance.recorder:Recorder={root / name / 'trace'}"
    options = {"serve": "always", "audit": "True", "train_share": "0.5", "train_max_steps": "4", "gate_timeout_s": "5"}
    words = [f"{SPEC}{option}={value}" for option, value in options.items()]
    words.append(f"{SPEC}plugins=[{','.join(repr(p) for p in (recorder, *plugins))}]")
    return VerlRun(policy, train, val, REWARD, root / name, steps, overrides=(*SMALL, *SEPARATE, *words, *more))


def test_a_late_actor_costs_a_plain_phase_and_one_that_dies_in_a_refresh_resumes(
    stage: tuple[Path, Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kills.let_runs_find_our_plugins(monkeypatch)
    plugins = ("test_verl_separate:Late", "test_verl_separate:Dies")
    first = verl(stage, "first", 12, *plugins, more=("trainer.save_freq=2",))
    metrics, failure = kills.follow(first)
    assert failure and DIES - 1 <= max(metrics) <= DIES + 1
    log = (stage[0] / "first" / "verl.log").read_text()
    assert log.count("the actor has not finished the draft refresh") == 2, "once it was late, once it was dead"
    ends = {e["policy_version"]: e for e in read_trace(stage[0] / "first" / "trace") if e["hook"] == "spec_rollout_end"}
    assert ends[LATE - 1]["drafts"] and ends[LATE + 1]["drafts"], "before and after it, requests are drafted for"

    checkpoints = stage[0] / "first" / "checkpoints"
    step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoints / f'global_step_{step}'}")
    metrics, failure = kills.follow(verl(stage, "second", step + 3, more=where))
    assert not failure and max(metrics) == step + 3
    assert all(m["actor/spec/failed"] == 0 for m in metrics.values())
    then = {tuple(e["published"]) for e in published(stage[0] / "first" / "trace")}
    assert tuple(published(stage[0] / "second" / "trace")[0]["published"]) in then, "another draft than was saved"


def published(trace: Path) -> list[dict[str, object]]:
    return [e for e in read_trace(trace) if e["hook"] == "spec_draft_weights" and e["published"]]


def test_law_2_an_engine_whose_sampler_is_wrong_never_opens_its_gate(stage: tuple[Path, Path, Path, Path]) -> None:
    metrics, failure = kills.follow(verl(stage, "wrong", 2, more=(UNREPAIRED, f"{SPEC}serve=always")))
    assert not metrics and "LosslessError" in failure
