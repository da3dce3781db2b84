"""Training beside a policy on a card, with this CPU's memory in the place of the card's: what rests, and that no bit changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.drafts import SETTINGS, make_buffer, make_document, make_policy, make_trainer, weights

from draft_training import DraftTrainer, digest
from draft_training.card import HostOffload, host_memory, own_modes

OFFLOADED = replace(SETTINGS, offload=True)


def test_what_rests_is_moved_and_comes_back_bit_by_bit():
    tensor, counter = torch.randn(5, 3), torch.tensor(7.0)
    bits, place = tensor.clone(), tensor.data_ptr()
    offload = HostOffload(torch.device("cpu"), lambda: [tensor, tensor, counter])
    with offload.on_device():
        assert tensor.data_ptr() == place
    host = tensor.data_ptr()
    assert host != place and torch.equal(tensor, bits)
    tensor[0] = 1.0  # while it rests, as a new policy does
    with offload.on_device():
        assert tensor.data_ptr() not in (host, 0) and torch.equal(tensor[0], torch.ones(3))
        tensor[1] = 2.0
    assert tensor.data_ptr() == host, "the host's memory is allocated once"
    assert torch.equal(tensor[:2], torch.tensor([[1.0] * 3, [2.0] * 3])) and torch.equal(tensor[2:], bits[2:])


def test_it_rests_again_after_a_failure():
    tensor = torch.randn(4)
    offload = HostOffload(torch.device("cpu"), lambda: [tensor])
    with offload.on_device():
        pass
    host = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="out of memory"), offload.on_device():
        raise RuntimeError("out of memory")
    assert tensor.data_ptr() == host


def resting(trainer: DraftTrainer) -> list[torch.Tensor]:
    return [t for t in (*trainer._optimizer.state().values(), *trainer._policy()) if t.numel() > 1]


def places(trainer: DraftTrainer) -> list[int]:
    return [t.data_ptr() for t in resting(trainer)]


@pytest.mark.parametrize("kind", ["tiny", "pruned"])
def test_training_with_and_without_offloading_gives_the_same_bits_but_for_a_rounded_momentum(kind, request, tmp_path):
    config = request.getfixturevalue(kind)
    found = []
    for offload in (False, True):
        t, buffer = make_trainer(config, replace(SETTINGS, offload=offload)), make_buffer()
        t.train_slice(buffer, 60, 3)
        before = places(t)
        for momentum in t._optimizer.momenta():
            assert momentum.dtype == (torch.bfloat16 if offload else torch.float32)
            momentum.copy_(momentum.bfloat16())  # what resting does
        t.update_policy(*make_policy(seed=8), 2)  # while it rests
        t.evaluate([make_document(20, 5)])
        t.save(tmp_path / f"{kind}-{offload}")
        t.train_slice(buffer, 60, 2)
        for momentum in t._optimizer.momenta():
            momentum.copy_(momentum.bfloat16())
        assert (places(t) == before) or not offload, "the same host memory again"
        again = make_trainer(config, replace(SETTINGS, offload=offload))
        again.load(tmp_path / f"{kind}-{offload}")
        again.update_policy(*make_policy(seed=8), 2)
        again.train_slice(make_buffer(seed=1), 60, 2)
        state = {str(i): tensor.float() for i, tensor in enumerate(resting(t))}
        found.append((weights(t), digest(state), weights(again)))
    assert found[0] == found[1]


def test_everything_that_only_slices_need_rests_between_them(tiny):
    t = make_trainer(tiny, OFFLOADED)
    t.train_slice(make_buffer(), 60, 1)
    matrices = sum(p.dim() > 1 for p in t.draft.parameters())
    assert t._offload is not None and all(t._offload._is_offloaded(x) for x in t._offload._distinct())
    assert len(t._offload._distinct()) >= matrices + 1, "the optimizer's state, and the policy's head"


def test_what_nothing_changes_is_copied_to_the_device_and_not_back():
    constant, changing = torch.arange(4.0), torch.arange(4.0)
    offload = HostOffload(torch.device("cpu"), lambda: [changing], lambda: [constant])
    with offload.on_device():
        pass
    with offload.on_device():
        constant += 1.0  # would be a mistake; it shows that nothing was copied back
        changing += 1.0
        there = constant.clone(), changing.clone()
    assert torch.equal(constant, there[0] - 1.0) and torch.equal(changing, there[1])


def test_a_block_of_work_brings_everything_to_the_device_once(tiny, monkeypatch):
    t = make_trainer(tiny, OFFLOADED)
    t.train_slice(make_buffer(), 60, 1)
    entered, usual = [], HostOffload.on_device
    monkeypatch.setattr(HostOffload, "on_device", lambda self: entered.append(1) or usual(self))
    with t.working():
        t.evaluate([make_document(20, 5)])
        t.train_slice(make_buffer(), 60, 2)
    assert len(entered) == 1 and all(t._offload._is_offloaded(x) for x in t._offload._distinct())


def test_products_are_rounded_on_a_card_only_and_only_in_the_block():
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    with own_modes(torch.device("cuda")):
        assert switch.fp32_precision == "tf32"
    assert switch.fp32_precision == before
    with pytest.raises(KeyError), own_modes(torch.device("cuda")):
        raise KeyError
    assert switch.fp32_precision == before
    with own_modes(torch.device("cpu")):
        assert switch.fp32_precision == before


def test_where_memory_cannot_be_pinned_what_rests_lies_in_ordinary_memory_and_the_log_says_so(monkeypatch, caplog):
    """As under a limit on locked memory; this torch, which has no card, pins nothing either."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level("INFO"):
        found = host_memory(torch.ones(3, dtype=torch.float64), torch.bfloat16)
    assert (found.shape, found.dtype, found.device.type) == ((3,), torch.bfloat16, "cpu") and not found.is_pinned()
    assert "host memory is not pinned" in caplog.text
