"""Law 2 on vLLM's V2 model runner: what replaces a rejected proposal is drawn independently of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from spec_plugin.engine.vllm import extension
from spec_plugin.engine.vllm.repairs.draft_noise import SALT, draft_has_the_targets_noise, with_noise_of_its_own


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


@dataclasses.dataclass
class Speculation:
    draft_sample_method: str
    method: str = "eagle3"
    rejection_sample_method: str = "standard"


#: of any engine that drafts on V2
PASSES = ["draft_passes_asked", "draft_passes_run", "draft_passes_apart"]


@pytest.mark.parametrize(
    ("drawn", "v2", "patched"),
    [
        ("probabilistic", True, [*PASSES, "draft_temperature_v2", "draft_noise"]),
        ("probabilistic", False, ["draft_temperature_v1"]),
        ("greedy", True, PASSES),
        ("greedy", False, []),
    ],
)
def test_law_2_an_engine_that_samples_its_proposals_starts_with_the_patches_of_its_runner(
    monkeypatch, drawn, v2, patched
):
    applied = []
    monkeypatch.setattr(extension.patches, "apply_each", lambda group, skip: applied.extend(p.name for p in group))
    for done_elsewhere in ("complete_target", "apply_cpu_patches"):
        monkeypatch.setattr(extension, done_elsewhere, lambda _: None)
    config = SimpleNamespace(
        speculative_config=Speculation(drawn),
        use_v2_model_runner=v2,
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
        additional_config={},
    )
    extension.SpecWorkerExtension.__new__(extension.SpecWorkerExtension, vllm_config=config)
    assert applied == patched
