"""Real OpenRLHF, one of whose processes is killed -9 in each phase: the run ends, nothing of ours stays, and it resumes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import kills
import pytest
import torch
from spec_plugin_conformance import tiny
from spec_plugin_conformance.launch import StepMetrics, follow
from spec_plugin_openrlhf.checkpoints import latest
from spec_plugin_openrlhf_cpu.run import OpenRLHFRun

from spec_plugin import hookimpl

pytestmark = pytest.mark.trainer

ENGINE = "SpecRolloutRayActor"
VICTIMS = {"actor": kills.HERE, "engine": ENGINE, "driver": kills.DRIVER, "core": f"{ENGINE}{kills.CORE}"}
STEPS = 6
PROMPTS, SAMPLES = 2, 8
FLAGS = {
    "--rollout.batch_size": PROMPTS,
    "--rollout.n_samples_per_prompt": SAMPLES,
    "--rollout.micro_batch_size": 8,
    "--train.micro_batch_size": 8,
    "--rollout.max_new_tokens": 64,
    "--actor.adam.lr": 1e-3,
    "--ckpt.save_steps": 1,
    "--spec.serve": "always",
    "--spec.audit": "true",
    "--spec.self_test": "false",  # most of a run's seconds, and the kit's subject
    "--spec.train_share": 0.5,
    "--spec.train_max_steps": 4,
    "--spec.control_share": 0.5,
}
#: what is particular to a case: flags; nothing imported before
HOW: dict[str, tuple[str, ...]] = {"": (), "async": ("--train.async_enable",), "hf": ("--ckpt.save_hf",), "cold": ()}
CASES = [
    *((phase, name, "") for phase, name in itertools.product(kills.PHASES, ("actor", "engine", "driver"))),
    ("rollout", "core", ""),  # vLLM's own process dies, and OpenRLHF's actor around it lives
    ("training", "core", ""),
    ("refresh", "core", ""),
    ("named", "actor", "hf"),
    ("refresh", "actor", "async"),
    ("training", "engine", "async"),
    ("training", "driver", "cold"),
]


class Kills(kills.Kills):
    """OpenRLHF saves between the sync, which begins the next phase, and the rollouts."""

    @hookimpl(tryfirst=True)
    def spec_rollout_start(self, policy_version: int) -> None:
        self.version = policy_version

    @hookimpl(tryfirst=True)
    def spec_save(self, path: Path) -> None:
        self._at("saving")
        self._at("rollout")
        if self.phase == "named" and self.version == kills.VERSION:
            threading.Thread(target=self._when_named, args=(path.name,), daemon=True).start()

    def _when_named(self, tag: str) -> None:
        """The checkpoint has become the one to resume from, and OpenRLHF goes on saving."""
        latest_file = self.folder / "first/checkpoints/_actor/latest"
        while not latest_file.exists() or latest_file.read_text() != tag:
            time.sleep(0.001)
        self._kill(self.phase, kills.process(self.who))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny policy, prompts, a reward."""
    root = tmp_path_factory.mktemp("openrlhf")
    data = tiny.write_jsonl(root / "data.jsonl", PROMPTS * STEPS)
    return tiny.make_target(root / "policy", torch.bfloat16), data, tiny.write_reward(root)


@dataclass(frozen=True)
class Cold:
    """A run whose processes import for themselves, as a user's do."""

    run: OpenRLHFRun

    def follow(self) -> Generator[tuple[int, StepMetrics], None, None]:
        """See ``OpenRLHFRun``."""
        return follow(replace(self.run.launch(), interpreter=None), self.run.records)


def openrlhf(stage: tuple[Path, Path, Path], out: Path, *plugins: str, more: tuple[str, ...] = ()) -> OpenRLHFRun:
    recorder = f"spec_plugin_conformance.recorder:Recorder={out / 'trace'}"
    flags = {**FLAGS, "--spec.plugins": ",".join((recorder, *plugins))}
    words = [str(word) for pair in flags.items() for word in pair]
    return OpenRLHFRun(*stage, out, STEPS, overrides=(*words, *more))


@pytest.mark.parametrize(("phase", "name", "how"), CASES, ids=["-".join(filter(None, case)) for case in CASES])
def test_a_killed_process_ends_the_run_leaves_nothing_and_the_run_resumes(
    phase: str,
    name: str,
    how: str,
    stage: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = kills.prepare(monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    killer = f"test_openrlhf_kills:Kills={phase}:{tmp_path}:{VICTIMS[name]}"
    run = openrlhf(stage, first, killer, more=HOW[how])
    seconds = kills.ends(Cold(run) if how == "cold" else run, tmp_path, before)

    checkpoints = first / "checkpoints"
    saved = latest(checkpoints)
    step = int((checkpoints / "_actor/latest").read_text().removeprefix("global_step"))
    assert step == kills.VERSION if phase == "named" else kills.VERSION - 1 <= step <= kills.VERSION + 1
    again = openrlhf(stage, second, more=("--ckpt.path", str(checkpoints), "--ckpt.load_enable", *HOW[how]))
    left = kills.goes_on(again, STEPS, second / "trace", saved, torch.bfloat16, "", before)
    assert not (checkpoints / "_spec_plugin").exists()
    case = "-".join(filter(None, (phase, name, how)))
    print(f"\n{case}: ended {seconds:.0f} s after the kill; {left} folders; resumed from step {step}", flush=True)
