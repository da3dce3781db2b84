"""OpenRLHF's launcher, on its real parser; whole runs of the trainer are the conformance kit's: ``make conformance``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from spec_plugin_openrlhf.checkpoints import latest

pytestmark = pytest.mark.trainer

#: an engine is gone and the refresh has failed; then the actor is killed when OpenRLHF has named its checkpoint the latest
ACTOR = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace as Some

import torch
import spec_plugin_openrlhf_cpu
spec_plugin_openrlhf_cpu.setup_worker()
from spec_plugin_openrlhf import policy
from spec_plugin_openrlhf.policy import SpecPolicyModelActor

folder = Path(sys.argv[1])

def save_checkpoint(self, tag):
    (folder / "_actor" / tag).mkdir(parents=True)
    (folder / "_actor/latest").write_text(tag)
    os.kill(os.getpid(), signal.SIGKILL)

def save(path):
    path.mkdir(parents=True)
    (path / "draft").write_text("of step 3")

def dead():
    raise RuntimeError("the engine is gone")

stock = SpecPolicyModelActor.__mro__[1]
stock.save_checkpoint, stock.broadcast_to_vllm = save_checkpoint, lambda self: None
SpecPolicyModelActor._spec_synced = lambda self: None
policy.ray = Some(get=lambda answers: answers)
actor = object.__new__(SpecPolicyModelActor)
actor.strategy, actor.disable_ds_ckpt = Some(args=Some(ckpt=Some(path=str(folder)))), False
actor.vllm_engines = [Some(spec_lives=Some(remote=dead))]
for failed, link in ((False, "link"), (True, None), (True, "link")):
    actor._spec = Some(session=Some(failed=failed), save=save, link=link)
    try:
        actor.broadcast_to_vllm()
    except RuntimeError as error:
        print(failed, link, error, flush=True)
torch.distributed.get_rank = lambda: 0
actor.save_checkpoint("global_step3")
"""
FLAGS = ("--actor.model_name_or_path", "nowhere", "--vllm.num_engines", "1")


def launcher(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The launcher on a CPU, with its output as text."""
    command = [sys.executable, "-m", "spec_plugin_openrlhf_cpu", "spec_plugin_openrlhf", *arguments]
    return subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, text=True, capture_output=True)


def test_help_teaches_openrlhfs_flags_and_ours() -> None:
    done = launcher("--help")
    assert done.returncode == 0
    assert "--rollout.n_samples_per_prompt" in done.stdout and "--spec.train_share" in done.stdout


def test_a_misspelt_option_stops_before_ray_starts() -> None:
    done = launcher(*FLAGS, "--spec.enable", "--spec.train_shar", "0.2")
    assert done.returncode != 0 and "did you mean --spec.train_share" in done.stderr and "Traceback" not in done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr


def test_what_is_not_supported_is_refused_in_one_sentence() -> None:
    done = launcher(*FLAGS, "--ds.tensor_parallel_size", "2", "--spec.enable")
    assert done.returncode != 0 and "does not support a tensor parallel actor" in done.stderr


def test_options_without_the_flag_are_refused() -> None:
    done = launcher(*FLAGS, "--spec.k", "5")
    assert done.returncode != 0 and "--spec.enable" in done.stderr


def test_the_draft_is_saved_before_openrlhf_names_the_checkpoint_and_none_after_an_engine_is_gone(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", ACTOR, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, text=True, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (latest(tmp_path) / "draft").read_text() == "of step 3"
    assert [line for line in done.stdout.splitlines() if "is gone" in line] == ["True link the engine is gone"]


def test_a_bad_target_ends_in_a_line_and_not_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": "64"}')
    flags = ("--actor.model_name_or_path", str(tmp_path), "--vllm.num_engines", "1")
    done = launcher(*flags, "--spec.enable")
    assert done.returncode != 0 and "vocab_size='64'" in done.stderr and str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr and "Started a local Ray instance" not in done.stdout + done.stderr
