"""Law 2 on vLLM's V2 model runner: what replaces a rejected proposal is drawn independently of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spec_plugin.engine import extension
from spec_plugin.engine.repairs import draft_noise, patches
from spec_plugin.engine.repairs.draft_noise import SALT, draft_has_the_targets_noise, with_noise_of_its_own

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).parent / "noise_kernels.py"
#: folders with a package vllm whose kernels run here: the installed one, and of tools/make_env.py's those that have the fault
FOLDERS = [Path(find_spec("vllm").origin).parents[1]] if find_spec("vllm") else []
FOLDERS += [
    kernels.parents[5]
    for kernels in sorted(ROOT.glob(".envs/*/lib/*/site-packages/vllm/v1/worker/gpu/sample/gumbel.py"))
    if "_DRAFT_NOISE_SALT" not in kernels.read_text()
]


def gumbel_sample(logits, rows, temperature, seeds, pos, **_):
    return pos


def sample_draft(self, hidden_states, positions, idx_mapping, temperature, seeds, draft_step, draft_logits):
    """As vLLM 0.24 to 0.28 have it (``v1/worker/gpu/spec_decode/speculator.py``), less what is kept of the logits."""
    logits = self.model.compute_logits(hidden_states)
    return gumbel_sample(logits, idx_mapping, temperature, seeds, positions + 1, apply_temperature=True)


def mended(self, hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits):
    """As 0.29 has it."""
    logits = self.model.compute_logits(hidden_states)
    return gumbel_sample(logits, idx_mapping, temperature, seeds, sample_src_positions, is_drafting=True)


def greedy(self, hidden_states, *_):
    return self.model.compute_logits(hidden_states).argmax(dim=-1)


def test_the_fault_is_found_and_gone_behind_the_repair():
    assert draft_has_the_targets_noise(sample_draft)
    assert not draft_has_the_targets_noise(with_noise_of_its_own(sample_draft))
    assert not draft_has_the_targets_noise(mended)
    assert globals()["gumbel_sample"](None, None, None, None, 7) == 7, "the probe left something behind"


def test_a_draft_that_draws_in_an_unknown_way_is_no_draft_without_the_fault():
    with pytest.raises(ValueError, match="no proposal"):
        draft_has_the_targets_noise(greedy)


def test_each_position_keeps_a_noise_of_its_own():
    speculator = SimpleNamespace(model=SimpleNamespace(compute_logits=lambda states: states))
    positions = torch.arange(4)
    drawn_at = with_noise_of_its_own(sample_draft)(speculator, None, positions, None, None, None, None, None)
    assert drawn_at.tolist() == [SALT + 1, SALT + 2, SALT + 3, SALT + 4]
    assert positions.tolist() == [0, 1, 2, 3], "others read them, too"


@pytest.mark.skipif(not FOLDERS, reason="needs vLLM")
def test_behind_the_patch_the_installed_vllm_has_no_such_fault():
    (patch,) = draft_noise.NOISE_PATCHES
    try:
        assert patches.apply(patch).state in ("in force", "not needed")
        assert not draft_has_the_targets_noise(patches.resolve(patch)[2])
    finally:
        patches.revert(patch)


@dataclasses.dataclass
class Speculation:
    draft_sample_method: str
    method: str = "eagle3"
    rejection_sample_method: str = "standard"


@pytest.mark.parametrize(
    ("drawn", "v2", "patched"), [("probabilistic", True, True), ("greedy", True, False), ("greedy", False, False)]
)
def test_law_2_an_engine_of_v2_that_samples_its_proposals_starts_with_the_patch(monkeypatch, drawn, v2, patched):
    applied = []
    monkeypatch.setattr(extension.patches, "apply_each", lambda group, skip: applied.extend(p.name for p in group))
    for done_elsewhere in ("complete_target", "apply_cpu_patches", "prepare_proposer"):
        monkeypatch.setattr(extension, done_elsewhere, lambda _: None)
    config = SimpleNamespace(
        speculative_config=Speculation(drawn),
        use_v2_model_runner=v2,
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
        additional_config={},
    )
    extension.SpecWorkerExtension.__new__(extension.SpecWorkerExtension, vllm_config=config)
    assert applied == (["draft_noise"] if patched else [])


@pytest.mark.skipif(not find_spec("triton") or not FOLDERS, reason="needs Triton and vLLM")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parents[2].name)
def test_law_2_with_vllms_kernels_a_proposal_says_nothing_of_the_targets_noise_at_its_position(folder):
    found = drawn_by_kernels(folder, 0)
    assert found["before"]["same"] == 1.0, "vLLM's own draws with another noise: has the repair become needless?"
    assert found["after"]["same"] < 0.2  # of 24; by chance 1 in 64


def drawn_by_kernels(folder: Path, requests: int) -> dict:
    """What ``noise_kernels.py`` prints."""
    environment = {**os.environ, "SPEC_PLUGIN_CPU_RUNNER": "v2", "VLLM_LOGGING_LEVEL": "ERROR"}
    python = Path(sys.prefix) / "bin" / "python"  # not one that is forked with vLLM in it, as sys.executable may be
    command = [str(python), str(SCRIPT), str(folder), str(requests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
