"""Draft training on a card: losses, the kernel for its float32, what rests in host memory, the checksum of weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.drafts import SETTINGS, TINY, make_buffer, make_document, make_policy
from on_card import DEVICE, HERE

from draft_training import DraftConfig, DraftTrainer, TrainSettings, fingerprint
from draft_training.attention import explicit_column_attention, proven_kernel
from draft_training.card import Resident, host_memory, own_modes
from draft_training.fused_attention import CPU, EFFICIENT, fused_column_attention
from draft_training.loss import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CARD, chunk_elements_on
from draft_training.optimizer import orthogonalised

pytestmark = pytest.mark.gpu
#: ten bits of mantissa, in products of some thousand terms
TF32 = 3e-3
STEPS = 12


def trainer_on(device: torch.device | str, pruned: bool = False, settings: TrainSettings = SETTINGS) -> DraftTrainer:
    config = DraftConfig.from_target(TINY, draft_vocab_size=24 if pruned else None)
    trainer = DraftTrainer(config, settings, device=device, seed=0)
    trainer.update_policy(*(tensor.to(device) for tensor in make_policy()), 0)
    return trainer


@pytest.mark.parametrize("pruned", [False, True])
def test_losses_of_a_slice_on_a_card_are_those_of_a_cpu(pruned):
    """The first by the rounding of TF32 alone; later ones by weights that went apart, whose optimizer works in bfloat16 there."""
    there = trainer_on("cpu", pruned)
    here = trainer_on(DEVICE, pruned, replace(SETTINGS, offload=True))
    for steps, tolerance in ((1, TF32), (STEPS, 0.05)):
        expected, found = (t.train_slice(make_buffer(), math.inf, steps) for t in (there, here))
        print(f"\n{steps} steps: loss {found.loss:.4f} on {DEVICE}, {expected.loss:.4f} on the CPU")
        assert (found.steps, found.skipped, found.tokens) == (expected.steps, 0, expected.tokens)
        assert found.loss == pytest.approx(expected.loss, rel=tolerance)
    judged = [make_document(40, seed) for seed in range(90, 94)]
    expected, found = (t.evaluate(judged) for t in (there, here))
    assert found.acceptance_length == pytest.approx(expected.acceptance_length, rel=0.1)
    assert found.tokens == expected.tokens


def test_a_draft_in_training_takes_the_fused_kernel_of_its_device():
    """Which was compared with explicit scores on the card itself, forwards and backwards."""
    kernel = proven_kernel(DEVICE, torch.float32, 8)
    assert kernel is (EFFICIENT if HERE else CPU)
    generator = torch.Generator().manual_seed(1)
    q, *rest = (torch.randn(2, 150, heads, 8, generator=generator) for heads in (4, 2, 2, 2, 2))
    pairs = list(zip(rest[0::2], rest[1::2], strict=True))
    on_device = [(k.to(DEVICE), v.to(DEVICE)) for k, v in pairs]
    found = fused_column_attention(kernel, q.to(DEVICE), on_device).cpu()
    torch.testing.assert_close(found, explicit_column_attention(q, pairs), atol=1e-4, rtol=1e-4)


def test_products_are_rounded_to_tf32_in_the_block_alone():
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 512, 512, generator=generator).double()
    exact = a @ b

    def error() -> float:
        return float(((a.float().to(DEVICE) @ b.float().to(DEVICE)).cpu() - exact).abs().max())

    before = error()
    with own_modes(DEVICE):
        inside = error()
    print(f"\nlargest error {before:.1e}, in the block {inside:.1e}")
    assert error() == before < 1e-3
    assert (inside > 10 * before) == HERE and inside < 0.5


def test_the_optimizer_orthogonalises_in_bfloat16_on_a_card():
    matrix = torch.randn(96, 160, generator=torch.Generator().manual_seed(3))
    found = orthogonalised(matrix.to(DEVICE)).cpu()
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.5 and float(values.max()) < 1.5
    assert float((found - orthogonalised(matrix)).abs().max()) < 0.05


def test_what_slices_alone_need_rests_in_pinned_host_memory_between_them():
    trainer = trainer_on(DEVICE, settings=replace(SETTINGS, offload=True))
    trainer.train_slice(make_buffer(), math.inf, 1)
    resting = [t for t in (*trainer._optimizer.state().values(), *trainer._policy()) if t.numel() > 1]
    assert resting and all(t.device.type == "cpu" and t.is_pinned() == HERE for t in resting)
    before = torch.cuda.memory_allocated() if HERE else 0
    trainer.train_slice(make_buffer(), math.inf, 2)
    assert {p.device.type for p in trainer.draft.parameters()} == {DEVICE.type}
    assert not HERE or torch.cuda.memory_allocated() <= before, "a slice gives the card back what it took"


def test_policies_copies_keep_their_dtype_on_a_card_and_the_embedding_stays_with_the_host():
    trainer = trainer_on(DEVICE, settings=replace(SETTINGS, offload=True))
    head = trainer._policy()[1]
    policy = [tensor.to(DEVICE, torch.bfloat16) for tensor in make_policy(seed=8)]
    trainer.update_policy(*policy, 1)
    embed, head = trainer._policy()
    assert embed.device.type == "cpu" and {embed.dtype, head.dtype} == {torch.bfloat16 if HERE else torch.float32}
    assert torch.equal(embed.bfloat16(), policy[0].cpu()) and torch.equal(head.cpu().bfloat16(), policy[1].cpu())
    assert trainer.train_slice(make_buffer(), math.inf, 2).steps == 2


def test_documents_are_moved_once_with_the_rows_of_an_embedding_that_is_the_hosts():
    document, (embed, _) = make_document(30, 1), make_policy()
    resident = Resident(DEVICE)
    moved = resident.of(document, embed)
    assert resident.of(document, embed) is moved and moved.aux.device.type == DEVICE.type
    assert torch.equal(moved.aux.cpu(), document.aux) and torch.equal(moved.input_ids.cpu(), document.input_ids)
    if HERE:
        assert torch.equal(moved.embeds.cpu(), embed[document.input_ids])
        assert resident.of(document, embed.to(DEVICE)) is moved
    assert host_memory(moved.aux).is_pinned() == HERE
    assert chunk_elements_on(DEVICE) == (CHUNK_ELEMENTS_ON_CARD if HERE else CHUNK_ELEMENTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_the_checksum_of_weights_is_the_same_on_a_card_and_on_a_cpu(dtype):
    """In many blocks at once there, and one by one here; tensors at an odd place, too."""
    generator = torch.Generator().manual_seed(4)
    whole: Any = torch.randint(-1000, 1000, (5_000_003,), generator=generator).to(dtype)
    there = whole.to(DEVICE)
    for cut in (slice(None), slice(1, None), slice(7), slice(0)):
        assert fingerprint({"a": there[cut], "b": there[:5]}) == fingerprint({"a": whole[cut], "b": whole[:5]})
