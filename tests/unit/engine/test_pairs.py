"""Plain steps in the middle of drafted ones: when they come, what is made of them, and when a stretch is given up."""

from __future__ import annotations

import pytest

from spec_plugin.engine.vllm.schedule.pairs import STEPS, PairedSteps
from spec_plugin.engine.vllm.schedule.steps import Timed

K = 3


def drive(pairs: PairedSteps, steps: int, batch: int = 8, drafted: float = 2.0, plain: float = 1.0) -> list[bool]:
    """So many steps of an engine that does as it is told one step later; which of them were plain."""
    was = []
    before = pairs.plain
    for _ in range(steps):
        now = pairs.plain
        kind = None if now != before else Timed(batch, 0 if now else K, plain if now else drafted)
        before = now
        pairs.note(kind)
        was.append(now)
    return was


def test_the_first_stretch_comes_as_soon_as_there_is_something_to_compare_it_with():
    pairs = PairedSteps()
    pairs.follow(0.05)
    was = drive(pairs, 40)
    assert was.index(True) == STEPS and sum(was) == STEPS + 2, "a step in which the engine changes over, one left out"
    (pair,) = pairs.take()
    assert (pair.batch, pair.k, pair.drafted_seconds, pair.plain_seconds) == (8, K, 2.0, 1.0)
    assert pairs.take() == []


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_no_more_steps_are_plain_than_may_be_over_many_phases(share):
    pairs, plain, steps = PairedSteps(), 0, 0
    for _ in range(20):
        pairs.follow(share)
        plain, steps = plain + sum(drive(pairs, 200)), steps + 200
    found = len(pairs.take())
    assert found >= 0.7 * share * steps / (STEPS + 1)
    assert plain <= 1.2 * share * steps + 2 * (STEPS + 2), "the change-over of each stretch beside what is noted"


def test_without_a_share_nothing_is_plain_and_nothing_is_noted():
    pairs = PairedSteps()
    assert not any(drive(pairs, 100)) and pairs.take() == []


@pytest.mark.parametrize("at", ["before", "plain", "behind"])
def test_a_batch_that_shrinks_by_much_meanwhile_makes_no_pair_and_the_engine_drafts_on(at):
    pairs = PairedSteps()
    pairs.follow(0.2)
    first = {"before": STEPS - 1, "plain": STEPS + 3, "behind": 2 * STEPS + 5}[at]
    drive(pairs, first)
    was = drive(pairs, 60, batch=5)
    assert not all(was)
    assert {pair.batch for pair in pairs.take()} == {5}


def test_of_a_batch_that_drains_evenly_drafted_steps_are_of_as_many_requests_as_the_plain_ones_between_them():
    """A step takes as long as its batch is large, or twice that."""
    pairs, batch = PairedSteps(), 32.0
    pairs.follow(0.2)
    while batch > 24.0:
        size = round(batch)
        drive(pairs, 1, batch=size, drafted=2.0 * size, plain=float(size))
        batch -= 0.25
    (pair,) = pairs.take()
    assert pair.drafted_seconds == pytest.approx(2.0 * pair.plain_seconds, rel=0.03)
    assert pair.batch == pytest.approx(pair.plain_seconds, rel=0.03)


def test_a_stretch_that_meets_other_steps_all_along_is_given_up():
    pairs = PairedSteps()
    pairs.follow(0.05)
    drive(pairs, STEPS)
    assert pairs.plain
    for _ in range(3 * STEPS + 1):
        pairs.note(None)
    assert not pairs.plain and pairs.take() == []


def test_the_median_of_a_stretch_counts_and_the_mean_where_drafts_are_ragged():
    for variable_length, expected in ((False, 2.0), (True, 2.75)):
        pairs = PairedSteps(variable_length)
        pairs.follow(0.05)
        seconds = iter([2.0, 2.0, 2.0, 8.0, 2.0, 2.0, 2.0, 2.0, 2.0])
        before = False
        for _ in range(30):
            now = pairs.plain
            if now != before:
                pairs.note(None)
            else:
                pairs.note(Timed(4, 0 if now else K, 1.0 if now else next(seconds, 2.0)))
            before = now
        assert pairs.take()[0].drafted_seconds == pytest.approx(expected)


def test_a_new_phase_ends_a_stretch():
    pairs = PairedSteps()
    pairs.follow(0.05)
    drive(pairs, STEPS)
    assert pairs.plain
    pairs.follow(0.05)
    assert not pairs.plain


def test_steps_of_other_kinds_before_a_stretch_are_not_held_against_it():
    pairs = PairedSteps()
    pairs.follow(0.05)
    for _ in range(50):
        pairs.note(None)
    drive(pairs, 30)
    assert len(pairs.take()) == 1
