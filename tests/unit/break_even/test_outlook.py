"""Draft work rests where no draft can come to pay, and only there; it is looked at again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from builders.controller import controller, promised, rolled_out

from spec_plugin.api.events import RolloutStats, StepTiming
from spec_plugin.policy.break_even.outlook import Outlook
from spec_plugin.step_cost.chances import tokens_per_step

K = 3


def pays_from(least: float) -> Callable[[Sequence[float]], bool]:
    return lambda curve: tokens_per_step(curve, K) >= least


def after(gains: Sequence[float], least: float, tried: bool = True) -> Outlook:
    """Behind rollouts, each after the draft was measured to make so many tokens a step beyond the first."""
    outlook = Outlook(K)
    for gain in gains:
        curve = (gain, 0.0)
        outlook.measured(curve)
        outlook.rolled_out(curve, pays_from(least), tried)
    return outlook


def flat(count: int) -> list[float]:
    return [0.20 + 0.01 * (i % 2) for i in range(count)]


def test_a_draft_that_no_longer_grows_and_does_not_pay_rests_and_not_before_much_was_measured():
    assert not after(flat(7), 1.6).rests
    outlook = after(flat(12), 1.6)
    assert outlook.rests and outlook.resting
    assert outlook.hoped_gain == pytest.approx(0.205, abs=0.03)


def test_a_draft_that_grows_goes_on_and_so_does_one_that_nobody_has_tried():
    assert not after([0.02 * i for i in range(12)], 1.6).rests, "in a straight line it would pay"
    assert not after(flat(12), 1.6, tried=False).rests, "the engine may accept more than training's replay says"
    assert after([0.02 * i for i in range(12)], 2.9).rests, "not even so"


def test_where_a_perfect_draft_would_not_pay_nothing_is_hoped_for_and_one_rollout_does_not_say_so():
    outlook = Outlook(K)
    for rests in (False, False, True, True):
        outlook.rolled_out(None, pays_from(K + 2.0), tried=False)
        assert outlook.rests is rests
    assert "always right (4 tokens a step)" in outlook.why(1.0)
    outlook.rolled_out(None, pays_from(2.0), tried=False)
    assert not outlook.rests, "smaller batches, such as of longer responses, may bring it back at once"


def test_one_step_of_all_draft_work_after_seven_fourteen_and_then_every_28_rollouts():
    outlook = after(flat(200), 1.6)
    outlook.served()
    looks = []
    for rollout in range(120):
        outlook.rolled_out((0.2, 0.0), pays_from(1.6), tried=True)
        looks += [] if outlook.rests else [rollout]
        assert outlook.resting, "a look is not a change of mind"
    assert [b - a for a, b in pairwise(looks)] == [15, 29, 29, 29]
    outlook.measured((0.9, 0.0))
    outlook.rolled_out((0.9, 0.0), pays_from(1.6), tried=True)
    assert not outlook.resting and not outlook.rests, "the policy has changed, and it pays"


def test_what_is_hoped_for_keeps_to_the_order_of_positions_and_promises_nothing_new():
    outlook = after(flat(12), 1.6)
    hoped = outlook.hoped((0.15, 0.10, 0.0))
    assert hoped[0] > hoped[1] > hoped[2] == 0.0
    assert tokens_per_step(hoped, K) == pytest.approx(1.0 + outlook.hoped_gain, rel=1e-3)
    assert Outlook(K).hoped((0.1,)) == (1.0,) * K and math.isinf(Outlook(K).hoped_gain)


def test_growth_in_a_straight_line_goes_on_to_four_times_the_text():
    assert after([0.01 * i for i in range(100)], 9.0).hoped_gain == pytest.approx(4.0, rel=0.02)


def test_what_is_kept_does_not_grow_with_the_run_and_the_latest_decides():
    outlook = after([0.9 - 1e-4 * i for i in range(5000)], 9.0)
    assert len(outlook._gains) == 1024 and outlook.hoped_gain == pytest.approx(0.43, abs=0.02)


def plain(batch: int = 8) -> RolloutStats:
    return RolloutStats(0, 8, 1000, 10.0, 0, 0, 0, steps=(StepTiming(batch, 0, True, 1.0, 125),))


def test_the_controller_says_so_once_with_numbers_and_asks_for_no_more_work(caplog):
    c = controller({8: 2.2})
    promised(c, (0.8, 0.7, 0.7))
    assert any(c.spec_schedule(0).table), "tried"
    rolled_out(c, 1.2)
    with caplog.at_level(logging.INFO):
        for i in range(40):
            if c.spec_can_pay():
                promised(c, (0.15 + 0.001 * (i % 3), 0.1, 0.1))
                c.spec_schedule(i)
            c.spec_rollout_end(plain())
    assert c.outlook.resting
    said = [r.message for r in caplog.records if "harvest and refreshes rest" in r.message]
    assert len(said) == 1 and "makes 1.02 tokens a step" in said[0], said


@pytest.mark.parametrize("options", [{"serve": "always"}, {"serve": "never"}, {"train": False, "draft": "d"}])
def test_what_the_user_has_asked_for_does_not_rest(options):
    c = controller({8: 9.0}, **options)
    for _ in range(5):
        c.spec_rollout_end(plain())
        assert c.spec_can_pay()


def test_a_draft_that_is_served_does_not_rest_and_one_whose_cost_is_unknown_neither():
    c = controller({8: 1.5})
    promised(c, (0.9, 0.9, 0.9))
    for i in range(20):
        assert any(c.spec_schedule(i).table)
        rolled_out(c, 3.0)
        assert c.spec_can_pay() and not c.outlook.resting
