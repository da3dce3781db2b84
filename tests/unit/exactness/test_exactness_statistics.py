"""Each statistic has mean zero under the policy's distribution, and weighed under the engine's: by adding up all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_plugin.policy.exactness.statistics import NAMES, log_law, statistics_of

V = 9


def law(kind: str, seed: int = 0) -> Tensor:
    """log p, [V] float64."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made = {
        "flat": 0 * logits,
        "random": 2 * logits,
        "sharp": 12 * logits,
        "alike": logits.round(),  # several tokens of one probability, at the edge of the unlikely ones and at the top
        "certain": torch.where(torch.arange(V) == 3, 0.0, -200.0).double(),
    }
    return made[kind].log_softmax(-1)


def of_all_tokens(log_p: Tensor) -> Tensor:
    """[V, S]: what each token would have."""
    return statistics_of(log_p.expand(V, V), torch.arange(V))


@pytest.mark.parametrize("kind", ["flat", "random", "sharp", "alike", "certain"])
@pytest.mark.parametrize("seed", range(4))
def test_law_2_each_statistic_has_mean_zero_if_the_token_is_sampled_from_the_policy(kind, seed):
    log_p = law(kind, seed)
    mean = log_p.exp() @ of_all_tokens(log_p)
    assert mean.abs().max() < 1e-12, dict(zip(NAMES, mean.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["flat", "random", "alike"])
def test_law_2_weighed_by_the_stated_log_prob_the_mean_is_zero_whatever_the_policy_was_rounded_to(kind):
    log_p, stated = law(kind), law("random", 17)
    weights = (log_p - stated).exp()
    mean = stated.exp() @ (weights[:, None] * of_all_tokens(log_p))
    assert mean.abs().max() < 1e-12


def test_bounds_are_those_that_the_docstring_names():
    found = torch.cat([of_all_tokens(law(kind, seed)) for kind in ("random", "sharp") for seed in range(20)])
    low, high = torch.tensor([[-1.0, -0.1, -2.0, -1e-4], [1.0, 0.9, 2.0, 1.0]], dtype=torch.float64)
    assert (found >= low - 1e-12).all() and (found <= high + 1e-12).all()


def test_float32_rounds_them_by_less_than_a_run_could_notice():
    log_p = law("random", 5)
    assert (of_all_tokens(log_p.float()) - of_all_tokens(log_p)).abs().max() < 1e-6


def test_a_token_that_the_policy_gives_no_chance_has_finite_values():
    log_p = torch.tensor([0.0, -torch.inf, -200.0]).expand(3, 3)
    assert statistics_of(log_p, torch.arange(3)).isfinite().all()


@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_law_is_that_of_the_rollouts_temperature_and_cap(cap):
    last, head = torch.randn(3, 4), torch.randn(V, 4)
    logits = last @ head.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    assert torch.allclose(log_law(last, head, 0.7, cap), (logits / 0.7).log_softmax(-1), atol=1e-5)
