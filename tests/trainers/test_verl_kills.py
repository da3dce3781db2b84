"""Real verl, one of whose processes is killed -9 in each phase: the run ends, nothing of ours stays behind, and it resumes."""

from __future__ import annotations

from pathlib import Path

import kills
import pytest
import torch
from spec_plugin_verl_cpu.run import SMALL, SPEC, VerlRun

pytestmark = pytest.mark.trainer

REWARD = Path(__file__).with_name("reward.py")
VICTIMS = {"actor": kills.HERE, "engine": "SpecHttpServer", "trainer": "TaskRunner"}


def verl(
    stage: tuple[Path, Path, Path, Path], out: Path, steps: int, *plugins: str, more: tuple[str, ...] = ()
) -> VerlRun:
    _, policy, train, val = stage
    recorder = f"spec_plugin_conformance.recorder:Recorder={out / 'trace'}"
    options = {"serve": "always", "audit": "True", "train_share": "0.5", "train_max_steps": "4", "control_share": "0.5"}
    words = [f"{SPEC}{option}={value}" for option, value in options.items()]
    words.append(f"{SPEC}plugins=[{','.join(repr(p) for p in (recorder, *plugins))}]")
    return VerlRun(policy, train, val, REWARD, out, steps, overrides=(*SMALL, *words, "trainer.save_freq=1", *more))


@pytest.mark.parametrize("name", VICTIMS)
@pytest.mark.parametrize("phase", kills.PHASES)
def test_a_killed_process_ends_the_run_leaves_nothing_and_the_run_resumes(
    phase: str, name: str, stage: tuple[Path, Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kills.prepare(monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    seconds = kills.ends(verl(stage, first, 8, f"kills:Kills={phase}:{tmp_path}:{VICTIMS[name]}"), tmp_path, before)

    step = int((first / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    checkpoint = first / f"checkpoints/global_step_{step}"
    again = verl(
        stage, second, step + 2, more=("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    )
    left = kills.goes_on(
        again, step + 2, second / "trace", checkpoint / "actor/spec_plugin", torch.float32, "actor/", before
    )
    print(f"{phase}, {name}: ended {seconds:.0f} s after the kill; {left} folders; resumed from step {step}")
