"""Pairs of steps put the cost model right, whatever else runs on the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_plugin.api.events import RolloutStats, StepPair, StepTiming
from spec_plugin.policy.break_even.correction import Correction
from spec_plugin.step_cost.model import CostModel

K = 3
#: a paused draft saves a tenth of a plain step, and three drafted tokens cost a fifth
CALIBRATION = tuple(
    StepTiming(b, k, paused, seconds, 16)
    for b in (1, 8)
    for k, paused, seconds in ((0, True, 1.0), (0, False, 1.0 / 0.9), (K, False, 1.2))
)


def correction(steps: tuple[StepTiming, ...] = CALIBRATION, whole_rollouts: bool = False) -> Correction:
    cost = CostModel()
    cost.observe(steps, calibration=True)
    return Correction(cost, whole_rollouts)


def pairs(factors: list[float], batch: int = 8) -> RolloutStats:
    """A rollout in which drafted steps took so many times what the start-up has timed, beside plain ones as it has."""
    made = tuple(StepPair(batch, K, 1.2 * factor, 1.0 / 0.9) for factor in factors)
    return RolloutStats(1, 8, 1000, 1.0, 400, 1200, 400, pairs=made)


def told(*factors: float) -> Correction:
    found = correction()
    found.add(pairs(list(factors)))
    return found


@pytest.mark.parametrize("factor", [0.8, 1.25, 2.0])
def test_the_cost_model_is_put_right_as_far_as_it_is_no_chance(factor):
    assert correction().factor == 1.0
    assert told(0.95, 1.05, 1.1, 0.92).factor == pytest.approx(1.0, abs=0.01), "pairs that are 5 to 10 % off"
    assert told(*[factor] * 30).factor == pytest.approx(factor, rel=0.03)
    assert 0.9 < told(*[factor, 1 / factor] * 8).factor < 1.1, "half of them say the opposite"


def test_law_7_few_pairs_can_show_only_that_drafted_steps_take_longer():
    assert told(2.0, 2.0).factor > 1.5 and told(0.5, 0.5).factor == 1.0


def test_a_burst_on_the_machine_moves_nothing():
    calm = told(*[1.4] * 20).factor
    assert told(*[1.4] * 20, *[30.0] * 2, *[0.05] * 2).factor == pytest.approx(calm, rel=0.02)
    assert told(*[1.4] * 20, *[30.0] * 4).factor == pytest.approx(calm, rel=0.02), "nor does a spell to its end"


def test_pairs_are_forgotten_when_there_are_newer_ones():
    found = told(*[2.0] * 32)
    found.add(pairs([1.0] * 32))
    assert found.factor == pytest.approx(1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_pairs_that_make_no_sense_are_left_out(seconds):
    found = correction()
    made = (StepPair(8, K, seconds, 1.0), StepPair(8, K, 1.0, seconds), StepPair(8, 0, 9.0, 1.0))
    found.add(replace(pairs([]), pairs=made * 9))
    assert found.factor == 1.0


def test_without_a_calibration_of_both_kinds_nothing_is_made_of_pairs_and_no_plain_steps_are_asked_for():
    found = correction(CALIBRATION[:1])
    found.add(pairs([2.0] * 50))
    assert found.factor == 1.0 and found.plain_share(1.0) == 0.0


def test_many_steps_are_compared_where_little_is_lost_and_fewer_as_evidence_grows():
    new, told_much = correction(), told(*[1.3] * 32)
    assert new.plain_share(1.0) == 0.25 and new.plain_share(0.5) == 0.25
    assert new.plain_share(2.0) == pytest.approx(0.04) and new.plain_share(1.5) * (1 - 1 / 1.5) == pytest.approx(0.02)
    assert told_much.plain_share(2.0) < 0.5 * new.plain_share(2.0)


@pytest.mark.parametrize("drafted_first", [False, True])
def test_an_engine_that_keeps_states_is_judged_by_rollouts_side_by_side(drafted_first):
    plain = RolloutStats(1, 8, 0, 1.0, steps=tuple(StepTiming(b, 0, True, 1.0, 10) for b in (4, 8)))
    steps = tuple(StepTiming(b, K, False, s, n) for b, s, n in ((8, 2.4, 9), (2, 9.0, 9)))
    drafted = RolloutStats(2, 8, 0, 1.0, 80, steps=steps)
    found, others = correction(whole_rollouts=True), correction()
    others.add(pairs([1.0]))  # it has pairs of steps
    for _ in range(8):
        for stats in (drafted, plain) if drafted_first else (plain, drafted):
            found.add(stats)
            others.add(stats)
    assert found.factor == pytest.approx(2.0, rel=0.05) and others.factor == 1.0
    found = correction(whole_rollouts=True)
    found.add(plain)
    found.add(RolloutStats(2, 8, 0, 1.0, 80))
    assert found.factor == 1.0, "no batch size in common"
    assert found.plain_every(2.0) == 25 and found.plain_every(1.0) == 4


def test_law_7_rollouts_too_short_for_a_pair_of_steps_are_compared_themselves_and_no_others():
    plain = RolloutStats(1, 8, 0, 1.0, steps=(StepTiming(8, 0, True, 1.0, 3),))
    drafted = RolloutStats(2, 8, 0, 1.0, 24, steps=(StepTiming(8, K, False, 2.4, 3),))
    found = correction()
    for _ in range(8):
        assert not found.by_rollouts
        found.add(drafted)
    assert found.by_rollouts
    for _ in range(3):
        found.add(plain)
        found.add(drafted)
    assert found.factor == pytest.approx(2.0, rel=0.05)
    found.add(pairs([1.0]))
    assert not found.by_rollouts, "there is a pair of steps after all"
