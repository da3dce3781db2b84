"""What a sampler's tensors take, as ``plan`` counts it, is what vLLM's real one has alive at once: measured on a CPU."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.controller import K, chosen, controller
from builders.session import TARGET
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_plugin import SpecConfig
from spec_plugin.api.speculation import Reason
from spec_plugin.policy import sampler_memory
from spec_plugin.policy.break_even import controller as controller_module

pytest.importorskip("vllm")
from vllm.v1.sample import rejection_sampler as v1
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class Peak(TorchDispatchMode):
    """Most bytes that storages of vocabulary size had together."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.now, self.peak, self.seen = least, 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return found

    def note(self, storage: torch.UntypedStorage) -> None:
        size, at = storage.nbytes(), storage.data_ptr()
        if size < self.least or at in self.seen:
            return
        self.seen.add(at)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.free, at, size)

    def free(self, at: int, size: int) -> None:
        self.seen.discard(at)
        self.now -= size


class NoKernel:
    """In the place of a Triton kernel, which makes no tensors."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def live_bytes(
    b: int, k: int, vocabulary: int, logprobs: int | None, monkeypatch: pytest.MonkeyPatch, drawn: bool = False
) -> int:
    for name in [name for name in vars(v1) if name.endswith("_kernel")]:
        monkeypatch.setattr(v1, name, NoKernel())
    monkeypatch.setattr(
        v1.Sampler, "gather_logprobs", staticmethod(lambda *args, **kwargs: None)
    )  # compiled; no new rows
    full = torch.full((b,), 1.0)
    metadata = SamplingMetadata(
        temperature=full,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=logprobs,
        logprob_token_ids=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=full,
        presence_penalties=full,
        repetition_penalties=full,
        output_token_ids=[[] for _ in range(b)],
        spec_token_ids=[[] for _ in range(b)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    drafts = SpecDecodeMetadata.make_dummy([[0] * k for _ in range(b)], torch.device("cpu"))
    sampler = v1.RejectionSampler(Sampler())
    monkeypatch.setattr(v1, "expand_batch_to_tokens", lambda x, cu, n, **_: torch.ones(n))
    with Peak(vocabulary * b) as peak, torch.inference_mode():
        logits = torch.zeros(b * (k + 1), vocabulary, dtype=torch.bfloat16)
        kept = torch.zeros(b, k, vocabulary) if drawn else None  # by the runner, from the step that drafted
        drawn_from = None if kept is None else torch.cat([row[:k] for row in kept], dim=0).contiguous()
        sampler(drafts, drawn_from, logits, metadata)
    return peak.peak


@pytest.mark.parametrize(("b", "k"), [(4, 3), (2, 1), (3, 8)])
def test_what_v1_has_alive_in_a_step_is_what_is_counted(b, k, monkeypatch):
    vocabulary = 1 << 14
    counted = vocabulary * (14 * b * (k + 1) + 8 * b * k + 6 * b)
    assert live_bytes(b, k, vocabulary, 0, monkeypatch) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(("b", "k"), [(4, 3), (3, 8)])
def test_what_v1_keeps_of_drawn_proposals_is_counted(b, k, monkeypatch):
    vocabulary = 1 << 14
    counted = vocabulary * (14 * b * (k + 1) + 16 * b * k + 6 * b)
    assert live_bytes(b, k, vocabulary, 0, monkeypatch, drawn=True) == pytest.approx(counted, rel=0.01)


def test_a_table_leaves_room_for_what_proposals_were_drawn_from():
    """1024 requests, a vocabulary of 152k, V1: what fits by the byte with greedy proposals does not with drawn ones."""
    table = (0,) + (8,) * 1024
    greedy, drawn = (sampler_memory.fit_sampler_memory(table, 152_064, sampled=sampled) for sampled in (False, True))
    assert all(k <= most for k, most in zip(drawn, greedy, strict=True)) and sum(drawn) < sum(greedy)
    assert drawn[64] == 8, "small batches draft as much"


def test_what_the_profile_of_v1_has_seen_is_no_less_than_what_is_counted(monkeypatch):
    vocabulary, b = 1 << 14, 4
    seen = live_bytes(b, 1, vocabulary, None, monkeypatch)
    assert (
        seen >= sampler_memory._V1_PROFILED * vocabulary * b
        and seen <= 1.15 * sampler_memory._V1_PROFILED * vocabulary * b
    )


@pytest.mark.parametrize(
    ("v2", "in_chunks", "most", "k"), [(True, True, 1024, 3), (True, False, 512, 3), (False, True, 1024, 1)]
)
def test_the_bound_is_that_of_the_runner_that_serves(v2, in_chunks, most, k, monkeypatch):
    """A vocabulary of 152k."""
    monkeypatch.setattr(controller_module, "v2_verifies_in_chunks", lambda: in_chunks)
    monkeypatch.setattr(controller_module, "runner_of", lambda *_: type("Runner", (), {"v2": v2})())
    c = controller({8: 2.0}, serve="always")
    target = replace(TARGET, hf_config={"vocab_size": 152_064}, max_num_seqs=most, device_type="cuda")
    c.spec_configure(SpecConfig.parse({"k": 3, "serve": "always"}), target, c._method)
    assert K >= 1 and c.spec_schedule(1).table[most] == k and chosen(c)[1] is Reason.ASKED_FOR
