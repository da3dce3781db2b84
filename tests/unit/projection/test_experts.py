"""Law 7 where a step's time depends on how many experts its tokens touch: the same few measurements tell the controller."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from spec_plugin_projection.constants import KNOWN, Constants
from spec_plugin_projection.experts import Experts
from spec_plugin_projection.hardware import CARDS
from spec_plugin_projection.roofline import Deployment, Roofline
from spec_plugin_projection.shapes import MODELS

from spec_plugin.api.events import StepTiming
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import CostModel

K, CONTEXT = 8, 1000.0
CALIBRATED = [(batch, k) for batch in (1, 8, 32, 128) for k in (0, 1, 3, K)]  # as the self-test has them
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MIXTURES = (("Qwen3-30B-A3B", 1), ("Qwen3-30B-A3B", 4), ("Qwen3-235B-A22B", 8), ("Mixtral-8x7B-v0.1", 2))


def steps_of(name: str, tp: int) -> Roofline:
    """What steps of it take on H100s, by its shape and the data sheet."""
    typical = Constants(**{field: constant.typical for field, constant in KNOWN.items()})
    return Roofline(Deployment(MODELS[name.lower()].with_whole_head(), CARDS["H100"], tp=tp), typical, CONTEXT)


def calibrated(truth: Roofline, noise: Callable[[], float] = lambda: 1.0) -> CostModel:
    """A cost model after the start-up's measurements; what factor is each measurement off by."""
    cost = CostModel()
    steps = [StepTiming(b, k, k == 0, noise() * truth.seconds(b, k), 20, CONTEXT) for b, k in CALIBRATED]
    cost.observe(steps, calibration=True)
    return cost


def test_verification_at_batch_size_1_costs_a_mixture_twice_what_it_costs_a_dense_policy() -> None:
    """Each drafted token brings experts of its own; from some dozens of tokens on all are read anyway (MoESD, section 3)."""
    mixture, dense = steps_of("Qwen3-30B-A3B", 1), steps_of("Qwen3-8B", 1)
    alone, many = (
        [truth.seconds(batch, K) / truth.seconds(batch, 0) for truth in (mixture, dense)] for batch in (1, 32)
    )
    assert alone[0] > 2 * alone[1] and many[0] < many[1]


@pytest.mark.parametrize(("name", "tp"), MIXTURES)
def test_what_was_not_measured_of_a_mixture_is_known_well_enough_to_choose_k(name: str, tp: int) -> None:
    truth = steps_of(name, tp)
    cost = calibrated(truth)
    errors = [abs(cost.seconds(b, k) / truth.seconds(b, k) - 1) for b in BATCHES for k in range(K + 1)]
    assert sorted(errors)[len(errors) // 2] < 0.022
    for batch in BATCHES:
        for accepted in (0.3, 0.5, 0.7, 0.9):
            gain = {k: tokens_per_step([accepted], k) / truth.seconds(batch, k) for k in range(K + 1)}
            believed = {k: tokens_per_step([accepted], k) / cost.seconds(batch, k) for k in range(K + 1)}
            chosen = max(believed, key=believed.__getitem__)
            assert gain[chosen] > 0.94 * max(gain.values()), (batch, accepted, chosen)
            assert gain[chosen] > 0.96 * gain[0]


def below_plain(seeds: int = 4, noise: float = 0.03) -> tuple[int, float]:
    """(choices of k under 0.97 of plain, median error) of all mixtures, where each measurement is off by that share."""
    slow, errors = 0, []
    for name, tp in MIXTURES:
        truth = steps_of(name, tp)
        for seed in range(seeds):
            rng = random.Random(f"{name} {tp} {seed}")
            cost = calibrated(truth, lambda rng=rng: 1 + noise * rng.gauss(0, 1))
            errors += [abs(cost.seconds(b, k) / truth.seconds(b, k) - 1) for b in BATCHES for k in range(K + 1)]
            for batch in BATCHES:
                for accepted in (0.3, 0.45, 0.6, 0.75, 0.9):
                    believed = {k: tokens_per_step([accepted], k) / cost.seconds(batch, k) for k in range(K + 1)}
                    k = max(believed, key=believed.__getitem__)
                    slow += tokens_per_step([accepted], k) * truth.seconds(batch, 0) < 0.97 * truth.seconds(batch, k)
    return slow, sorted(errors)[len(errors) // 2]


def test_law_7_on_noisy_measurements_hardly_a_choice_of_k_is_slower_than_plain() -> None:
    slow, error = below_plain()
    print(f"below 0.97 of plain: {slow}; median error {error:.3f}")
    assert slow < 15


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, Experts(128, 8)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, Experts(8, 2)),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, Experts(256, 8)),
        ({"text_config": {"num_experts": 4, "num_experts_per_tok": 9}}, Experts(4, 4)),
        ({"num_experts": 0, "num_experts_per_tok": 8}, None),
        ({"num_experts": 8}, None),
        ({"num_experts": "many", "num_experts_per_tok": None}, None),
    ],
)
def test_experts_are_read_off_the_targets_config(config: dict[str, object], found: Experts | None) -> None:
    assert Experts.of(config) == found


def test_experts_touched_go_from_those_of_one_token_to_all() -> None:
    experts = Experts(128, 8)
    assert experts.touched(1) == pytest.approx(8) and experts.touched(1000) == pytest.approx(128)
    assert 8 < experts.touched(2) < 16
