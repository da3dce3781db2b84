"""The judge: pairs of steps decide whether drafting pays, whatever the cost model says and whatever else runs on the machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders.steps import mixed_steps

from spec_plugin.builtin.break_even.judge import Judge
from spec_plugin.events import RolloutStats, StepPair, StepTiming
from spec_plugin.step_cost.model import CostModel, StepCost

K = 3
#: a paused draft saves a tenth of a plain step
CALIBRATION = tuple(StepTiming(b, 0, paused, 0.9 if paused else 1.0, 16) for b in (1, 8) for paused in (True, False))


def calibrated(steps: tuple[StepTiming, ...] = CALIBRATION) -> Judge:
    cost = CostModel()
    cost.observe(steps, calibration=True)
    return Judge(cost)


TABLE = (0,) + (K,) * 8


class _Flat(StepCost):
    """A cost model in which each drafted token makes a step a tenth longer."""

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        return 1.0 + 0.1 * k


FLAT = _Flat()


def pairs(ratios: list[float], batch: int = 8) -> RolloutStats:
    """A rollout in which plain steps took so many times as long as drafted ones."""
    made = tuple(StepPair(batch, K, 1.0, ratio) for ratio in ratios)
    return RolloutStats(1, 8, 1000, 1.0, 400, 1200, 400, steps=(StepTiming(batch, K, False, 1.0, 50),), pairs=made)


def told(speedups: list[float], tokens: float = 2.0) -> Judge:
    """A judge of drafts with these true speed-ups, in the order of the pairs."""
    judge = calibrated()
    judge.add_pairs(pairs([s / tokens / 0.9 for s in speedups]))
    return judge


def test_a_speed_up_is_that_of_a_plain_step_with_a_paused_draft():
    assert told([1.5] * 3).speedup((1.0, 0.0)) == pytest.approx(1.5)
    assert calibrated().speedup((0.5,)) is None and calibrated().pays((0.5,), TABLE, FLAT, True) is None


def test_a_speed_up_is_that_of_pairs_that_drafted_as_far_as_is_drafted_now_and_of_others_only_where_there_are_none():
    judge = told([1.5] * 9)
    reached_further = replace(pairs([]), pairs=(StepPair(8, 8, 1.0, 2.6 / 2.0 / 0.9),))
    judge.add_pairs(reached_further)
    assert judge.speedup((1.0, 0.0), (0,) + (8,) * 8) == pytest.approx(1.5), "one may be a fluke"
    for _ in range(2):
        judge.add_pairs(reached_further)
    assert judge.speedup((1.0, 0.0), (0,) + (8,) * 8) == pytest.approx(2.6)
    assert judge.speedup((1.0, 0.0), TABLE) == pytest.approx(1.5)
    assert judge.speedup((1.0, 0.0), (0,) + (2,) * 8) == judge.speedup((1.0, 0.0)) == pytest.approx(1.5)


def test_without_a_calibration_of_both_kinds_nothing_is_made_of_pairs():
    judge = calibrated(CALIBRATION[:1])
    judge.add_pairs(pairs([1.0] * 50))
    assert judge.speedup((0.5,)) is None


@pytest.mark.parametrize(
    ("speedup", "serving", "resting"), [(0.8, False, False), (1.02, True, False), (1.3, True, True)]
)
def test_law_7_drafts_in_use_have_the_benefit_of_the_doubt_and_others_clear_a_margin(speedup, serving, resting):
    judge = told([speedup * f for f in (0.98, 1.0, 1.02) * 4])
    assert judge.pays((1.0, 0.0), TABLE, FLAT, serving=True) is serving
    assert judge.pays((1.0, 0.0), TABLE, FLAT, serving=False) is resting


def test_acceptance_that_has_changed_since_counts():
    judge = told([1.3] * 8)
    assert judge.pays((1.0, 0.0), TABLE, FLAT, True) and not judge.pays((0.1, 0.0), TABLE, FLAT, True)


def test_a_burst_on_the_machine_moves_nothing():
    judge = told([1.4] * 20 + [0.05] * 2 + [30.0] * 2)
    assert judge.speedup((1.0, 0.0)) == pytest.approx(1.4)
    assert told([1.4] * 20 + [0.05] * 4).pays((1.0, 0.0), TABLE, FLAT, True), "nor does a spell that is slow to its end"


@pytest.mark.parametrize("alike", [True, False])
def test_time_in_which_the_draft_only_reads_counts_against_it(alike):
    """Whether the drafted steps are alike or some request of each is of the control group."""
    judge = calibrated()
    heard = pairs([1.1 / 2.0 / 0.9] * 8)
    if not alike:
        heard = replace(
            heard, steps=tuple(mixed_steps(s.batch, s.k, False, s.total, s.steps, s.steps) for s in heard.steps)
        )
    reading = StepTiming(16, 0, False, 1.0, 50)  # as long as the drafted steps; those of the pairs do not count
    own = StepTiming(8, 0, False, 1.0, 50)
    judge.add_pairs(RolloutStats(**{**vars(heard), "steps": (*heard.steps, own, reading)}))
    assert judge.speedup((1.0, 0.0)) == pytest.approx((1.1 + 0.9) / 2)


def test_the_cost_model_is_put_right_as_far_as_it_is_no_chance():
    cost = CostModel()
    cost.observe(
        [
            StepTiming(b, k, p, 1.0 if k == 0 else 1.2, 50)
            for b in (1, 8)
            for k, p in ((0, True), (0, False), (K, False))
        ]
    )
    judge = calibrated()
    assert judge.bias(cost) == 1.0
    judge.add_pairs(pairs([1.0 / 0.9 / 1.26]))
    assert judge.bias(cost) == 1.0, "one pair that is 5 % off"
    for _ in range(20):
        judge.add_pairs(pairs([1.0 / 0.9 / 2.4]))
    assert judge.bias(cost) == pytest.approx(2.0, rel=0.05)
    judge.add_pairs(pairs([1.0 / 0.9 / 1.2] * 4), anew=True)
    assert judge.bias(cost) == 1.0, "pairs of another draft are forgotten"


def test_many_steps_are_compared_where_little_is_lost_and_fewer_as_evidence_grows():
    new, told_much = calibrated(), told([1.3] * 32)
    assert new.plain_share(1.0) == 0.25 and new.plain_share(0.5) == 0.25
    assert new.plain_share(2.0) == pytest.approx(0.04) and new.plain_share(1.5) * (1 - 1 / 1.5) == pytest.approx(0.02)
    assert told_much.plain_share(2.0) < 0.5 * new.plain_share(2.0)


def test_an_engine_that_keeps_states_is_judged_by_rollouts_side_by_side():
    judge = calibrated()
    plain = RolloutStats(1, 8, 0, 1.0, steps=tuple(StepTiming(b, 0, True, 1.0, 10) for b in (4, 8)))
    drafted = RolloutStats(
        2, 8, 0, 1.0, 80, steps=tuple(StepTiming(b, K, False, s, n) for b, s, n in ((8, 1.6, 9), (2, 9.0, 9)))
    )
    judge.add_rollouts(plain, drafted)
    assert judge.speedup((1.0, 0.0)) == pytest.approx(2.0 / 1.6)
    judge.add_rollouts(plain, RolloutStats(2, 8, 0, 1.0, 80))
    assert math.isclose(judge.speedup((1.0, 0.0)) or 0.0, 2.0 / 1.6), "no batch size in common"
    assert judge.plain_every(2.0) == 25 and judge.plain_every(1.0) == 4


def test_pairs_of_another_k_are_judged_by_what_the_tables_own_k_would_take_and_make():
    judge = told([0.9] * 12)  # at k=3, for one token that is always right and two that never are
    fewer = (0,) + (1,) * 8
    assert judge.pays((1.0, 0.0), TABLE, FLAT, True) is False
    assert judge.pays((1.0, 0.0), fewer, FLAT, True) is True, "as many tokens in steps that are shorter by a sixth"
    assert judge.pays((1.0, 0.0), (0, *(K,) * 7, 0), FLAT, True) is None, "no pair was of a size that drafts"


def test_a_judge_without_a_calibration_asks_for_no_plain_steps():
    judge = calibrated(CALIBRATION[:1])
    assert not judge.calibrated and judge.plain_share(1.0) == 0.0 and calibrated().calibrated


def test_law_7_a_table_that_drafts_almost_nowhere_is_found_to_lose_without_a_pair():
    judge = calibrated()
    steps = (StepTiming(2, 1, False, 1.0, 1), StepTiming(8, 0, False, 1.0, 99))
    judge.add_pairs(RolloutStats(1, 8, 1000, 1.0, 2, 2, 1, steps=steps))
    assert judge.pays((1.0, 0.0), (0, 0, 1, *(0,) * 6), FLAT, True) is False
    assert judge.pays((1.0, 0.0), (0, 0, 1, *(0,) * 6), FLAT, False) is False
