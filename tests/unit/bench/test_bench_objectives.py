"""The other objectives of the bench: what they are equal to, and that they are trained as the default is."""

from __future__ import annotations

import pytest
import torch
from builders.drafts import TINY, make_document, make_policy

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings
from draft_training.chains import chain_weights
from examples.bench.objectives import OBJECTIVES, SMOOTHING, Objective, OtherTrainer


def trained(
    kind: type[DraftTrainer], objective: Objective | None = None, smoothing: float | None = None
) -> DraftTrainer:
    """A draft after three optimizer steps."""
    settings = TrainSettings(ttt_steps=3, tokens_per_step=64, chain_smoothing=smoothing)
    trainer = kind(DraftConfig.from_target(TINY), settings, device="cpu", dtype=torch.float64, seed=3)
    if objective is not None:
        trainer.objective = objective
    buffer = HiddenBuffer(4096, 1 << 30, seed=0)
    for seed in range(4):
        buffer.add(make_document(40, seed))
    trainer.update_policy(*make_policy(), 0)
    trainer.train_slice(buffer, float("inf"), 3)
    return trainer


@pytest.mark.parametrize(("smoothing", "name"), [(None, "kl"), (SMOOTHING, "kl-d-pace")])
def test_what_is_written_out_plainly_trains_as_the_trainers_own_loss_does(smoothing: float | None, name: str) -> None:
    own, written_out = trained(DraftTrainer, smoothing=smoothing), trained(OtherTrainer, OBJECTIVES[name])
    for at, tensor in own.draft.state_dict().items():
        torch.testing.assert_close(written_out.draft.state_dict()[at], tensor, rtol=1e-6, atol=1e-9)
    assert TrainSettings.chain_smoothing == SMOOTHING


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "kl"])
def test_each_other_objective_trains_another_draft(name: str) -> None:
    kl, other = trained(OtherTrainer, OBJECTIVES["kl"]).draft, trained(OtherTrainer, OBJECTIVES[name]).draft
    assert all(bool(torch.isfinite(t).all()) for t in other.state_dict().values())
    assert any(
        not torch.equal(a, b) for a, b in zip(kl.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("name", ["kl", "reverse-kl", "jsd", "tv", "nla", "lk-hybrid"])
def test_a_divergence_is_nought_where_both_agree_and_more_elsewhere(name: str) -> None:
    p = torch.randn(1, 5, 11, dtype=torch.float64).log_softmax(-1)
    q = torch.randn(3, 5, 11, dtype=torch.float64).log_softmax(-1)
    loss = OBJECTIVES[name].loss
    assert loss(p, p.expand(3, -1, -1)).abs().max() < 1e-12
    assert bool((loss(p, q) > 0).all())


def test_a_greedy_hit_is_the_chance_of_two_draws_that_agree() -> None:
    p, q = torch.tensor([[[0.7, 0.2, 0.1]]]).log(), torch.tensor([[[0.5, 0.5, 1e-30]]]).log()
    assert OBJECTIVES["hit"].loss(p, q).exp().item() == pytest.approx(1 / 0.45, rel=1e-5)


def test_a_chain_weighs_what_hangs_on_its_position() -> None:
    confidence = torch.tensor([[0.5, 0.9, 1.0], [0.1, 0.2, 0.4]])  # [J=2, R=3]; anchor 0 owns (0, 0) and (1, 1)
    valid = torch.tensor([[True, True, True], [False, True, False]])
    weight = chain_weights(confidence, valid, 0.5)
    first, second = 0.75, 0.6  # smoothed by a half
    assert weight[0, 0].item() == pytest.approx(first + first * second)
    assert weight[1, 1].item() == pytest.approx(first * second)
    assert weight[0, 1].item() == pytest.approx(0.95)  # its chain has no valid second position
    assert weight[1, 2].item() == 0.0
    assert weight[1, 0].item() == 0.0
