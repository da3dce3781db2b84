"""A draft's logits are multiplied by a number that can be written while it runs, in whatever dtype they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.repairs.draft_temperature import (
    TEMPERATURE_PATCHES,
    make_tempered,
    refuse_untempered,
    set_draft_temperature,
)


class Draft(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def compute_logits(self, hidden: Tensor | None, spec_step_idx: int = 0) -> Tensor | None:
        return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_proposals_are_drawn_at_the_temperature_in_force(dtype):
    draft = Draft(dtype)
    make_tempered(draft)
    logits = torch.tensor([[1.0, 3.0, float("-inf"), 2.0]], dtype=dtype)
    for temperature in (1.0, 0.5):
        set_draft_temperature(draft, temperature)
        made = draft.compute_logits(logits, spec_step_idx=1)
        assert made.dtype == dtype
        assert torch.allclose(made.float().softmax(-1), (logits.float() / temperature).softmax(-1), atol=1e-2)
    assert logits[0, 1] == 3.0, "vLLM's own tensor stays what it was"
    assert draft.compute_logits(None) is None, "a rank that gathers none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_at_0_the_likeliest_token_is_certain_and_no_large_logit_overflows(dtype):
    draft = Draft(dtype)
    make_tempered(draft)
    set_draft_temperature(draft, 0.0)
    made = draft.compute_logits(torch.tensor([[-200.0, 180.0, 181.0, float("-inf")]], dtype=dtype)).float().softmax(-1)
    assert made.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_the_number_is_written_in_place_as_a_captured_graph_needs():
    draft = Draft(torch.float32)
    make_tempered(draft)
    before = draft.spec_sharpness.data_ptr()
    set_draft_temperature(draft, 0.5)
    assert draft.spec_sharpness.data_ptr() == before and draft.spec_sharpness == 2.0
    assert not dict(draft.named_buffers()), "no refresh, digest or checkpoint takes it for a weight"


def test_a_draft_that_was_loaded_past_the_repair_is_refused_and_an_engine_of_greedy_drafts_is_not_asked():
    draft = Draft(torch.float32)
    set_draft_temperature(draft, 0.5)
    with pytest.raises(PatchError, match=r"Draft.*spec\.draft_sample_method=greedy"):
        refuse_untempered(draft)
    make_tempered(draft)
    refuse_untempered(draft)


def test_the_patches_temper_what_vllm_loads_and_know_that_they_do():
    class Proposer:
        def load_model(self, target_model: nn.Module) -> None:
            self.model = Draft(torch.float32)

    for patch in TEMPERATURE_PATCHES.values():
        assert patch.needed(Proposer.load_model)
        repaired = patch.replacement(Proposer.load_model)
        assert not patch.needed(repaired)
        proposer = Proposer()
        repaired(proposer, nn.Linear(1, 1))
        refuse_untempered(proposer.model)
