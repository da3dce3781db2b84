from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from draft_training.optimizer import DraftOptimizer, Muon, orthogonalised
from draft_training.settings import TrainSettings

SHAPES = [(8, 24), (24, 8), (16, 16)]


def matrices() -> list[Parameter]:
    stream = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=stream) * 0.1) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=stream) for shape in SHAPES]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_it_is_torchs_muon_but_for_the_precision_of_the_orthogonalisation():
    ours, theirs = matrices(), matrices()
    a = Muon(ours, 0.1, weight_decay=0.2)
    b = torch.optim.Muon(theirs, 0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="original")
    for step in range(3):
        for p, q, grad in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
    for p, q, begin in zip(ours, theirs, matrices(), strict=True):
        moved = (q - begin).norm()
        assert (p - q).norm() < 0.02 * moved, "bfloat16 has 8 bits"


@pytest.mark.parametrize("shape", [*SHAPES, (64, 192), (256, 320)])  # the last one in bfloat16, where the CPU has it
def test_an_orthogonalised_matrix_has_singular_values_near_one_whatever_its_scale(shape):
    for scale in (1e-6, 1.0, 1e6):
        values = torch.linalg.svdvals(
            orthogonalised(scale * torch.randn(shape, generator=torch.Generator().manual_seed(2)))
        )
        assert values.min() > 0.3 and values.max() < 1.3
    assert orthogonalised(torch.zeros(shape)).isfinite().all()


def optimizer(parameters: dict[str, Parameter]) -> DraftOptimizer:
    return DraftOptimizer(parameters, TrainSettings(lr=0.1, vector_lr=0.01, betas=(0.9, 0.95), weight_decay=0.0))


def parameters() -> dict[str, Parameter]:
    a, b, _ = matrices()
    return {"fc.weight": a, "lm_head.weight": b, "norm.weight": Parameter(torch.ones(8))}


def stepped(o: DraftOptimizer, of: dict[str, Parameter], steps: range) -> None:
    for step in steps:
        for i, p in enumerate(of.values()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
        o.step(1.0)


def test_a_saved_state_goes_on_bit_by_bit():
    whole, halves = parameters(), parameters()
    stepped(optimizer(whole), whole, range(6))
    first = optimizer(halves)
    stepped(first, halves, range(3))
    second = optimizer(halves)
    second.restore({k: v.clone() for k, v in first.state().items()})
    stepped(second, halves, range(3, 6))
    for name in whole:
        assert torch.equal(whole[name], halves[name])


def test_only_matrices_of_the_layer_go_to_muon():
    of = parameters()
    o = optimizer(of)
    stepped(o, of, range(1))
    kinds = {name: {key.split(".", 1)[0] for key in o.state() if key.endswith(name)} for name in of}
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert kinds == {"fc.weight": {"momentum"}, "lm_head.weight": adam, "norm.weight": adam}
