"""What drafts earn and cost: the seconds of a step, told by a clock that the test winds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders.steps import mixed_steps

from spec_plugin.api.events import RolloutStats, StepTiming
from spec_plugin.lifecycle import ledger as module
from spec_plugin.lifecycle.ledger import _DOUBT, Ledger


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def rollout(seconds: float) -> RolloutStats:
    """A phase in which the slowest engine decoded so long."""
    return RolloutStats(1, 8, 100, seconds, busy_seconds=seconds)


def test_a_synchronous_step_saves_what_decoding_would_have_taken_longer(clock):
    book = Ledger()
    assert book.metrics() == {}
    for _ in range(2):
        with book.spending():
            clock.now += 0.5  # refresh
        book.waits()
        clock.now += 10.0
        book.rolled_out(rollout(10.0), 1.6)
        book.works()
        book.spent(0.25)  # harvest
        clock.now += 5.0
        with book.spending():
            clock.now += 1.0  # training
        book.close()
    found = book.metrics()
    assert found == pytest.approx(
        {
            "spec/saved_s": 6.0,
            "spec/cost_s": 1.75,
            "spec/net_s": 4.25,
            "spec/saved_so_far_s": 12.0,
            "spec/cost_so_far_s": 3.5,
            "spec/net_so_far_s": 8.5,
        }
    )
    assert not book.hidden


def test_drafts_that_are_slower_earn_less_than_nothing_and_what_is_not_known_is_not_there(clock):
    book = Ledger()
    book.rolled_out(rollout(10.0), 0.9)
    book.close()
    assert book.metrics()["spec/net_s"] == pytest.approx(-1.0)
    book.rolled_out(rollout(10.0), None)
    book.spent(2.0)
    book.close()
    found = book.metrics()
    assert "spec/saved_s" not in found and "spec/net_s" not in found
    assert found["spec/cost_s"] == 2.0 and found["spec/net_so_far_s"] == pytest.approx(-3.0)
    book.close()
    assert book.metrics()["spec/cost_s"] == 0.0, "a step in which nothing was done"


def test_what_fails_was_spent_all_the_same(clock):
    book = Ledger()
    with pytest.raises(KeyError), book.spending():
        clock.now += 3.0
        raise KeyError
    book.close()
    assert book.metrics()["spec/cost_s"] == 3.0


def test_work_within_other_work_counts_once(clock):
    book = Ledger()
    with book.spending():
        clock.now += 1.0
        book.spent(0.5)
        with book.spending():
            clock.now += 2.0
        clock.now += 1.0
    book.spent(0.5)
    book.close()
    assert book.metrics()["spec/cost_s"] == 4.5


def overlapping(
    book: Ledger, clock: Clock, waits: float, works: float, decodes: float, times_as_long: float, in_sync: bool = False
) -> None:
    """The trainer waits for rollouts, before its own work or in the weight sync behind it, and works."""
    book.waits()
    clock.now += 0.0 if in_sync else waits
    book.works()
    clock.now += works
    book.close()
    book.waits()
    clock.now += waits if in_sync else 0.0
    book.rolled_out(rollout(decodes), times_as_long)
    book.waits()


@pytest.mark.parametrize("in_sync", [False, True])
@pytest.mark.parametrize(
    ("waits", "works", "decodes", "times_as_long", "saved", "hidden"),
    [
        (4.0, 6.0, 10.0, 1.6, 6.0, False),  # the engines decode all of the time: all of it is exposed
        (4.0, 6.0, 9.0, 1.6, 5.4, False),  # and nearly all: weights are sent meanwhile
        (0.2, 9.8, 8.0, 1.6, 3.0, False),  # hidden with drafts, exposed without
        (0.2, 9.8, 5.0, 1.6, 0.0, True),  # hidden with drafts and without, however much longer that takes
        (0.2, 9.8, 5.0, 1.0, 0.0, True),  # a plain phase
        (0.2, 9.8, 5.0, 0.9, 0.0, True),  # drafts only cost, where nobody waits
        (0.0, 10.0, 10.0, 0.8, 0.0, True),
        (4.0, 6.0, 9.0, 0.9, -0.9, False),
        (4.0, 6.0, 5.0, 1.0, 0.0, False),  # it waits for something else, tools say: not known to be hidden
    ],
)
def test_behind_the_trainers_own_work_only_what_would_stand_out_is_saved(
    clock, waits, works, decodes, times_as_long, saved, hidden, in_sync
):
    book = Ledger(overlaps=True)
    for phase in range(4):
        assert book.hidden is (hidden and phase > 2), "three phases in a row say it"
        overlapping(book, clock, waits, works, decodes, times_as_long, in_sync)
    book.close()
    assert book.metrics()["spec/saved_s"] == pytest.approx(saved)
    assert book.hidden is hidden


def test_what_is_told_of_the_time_without_drafts_may_be_too_little(clock):
    book = Ledger(overlaps=True)
    stats = RolloutStats(1, 8, 100, 9.0, 80, 240, 160, busy_seconds=9.0)
    for _ in range(4):
        book.waits()
        clock.now += 0.2
        book.works()
        clock.now += 9.8
        book.rolled_out(stats, 1.05)
    book.close()
    assert not book.hidden, "without drafts it may have been waited for"
    assert book.metrics()["spec/saved_s"] == 0.0, "by what is expected it would not"


@pytest.mark.parametrize(
    ("seconds", "busy", "at_most", "hidden"),
    [
        (5.0, 5.0, 2.0, True),
        (5.0, 5.0, 2.3, False),
        (8.0, 2.0, 2.0, True),  # the engine has requests for 8 s and runs steps for 2: that they may take longer is 2 s
        (8.0, 5.0, 2.0, False),
        (5.0, 0.0, 2.3, False),  # it says nothing of its steps
        (10.4, 10.4, 0.5, True),  # plain decoding that is faster: rollouts are hidden either way
    ],
)
def test_what_the_engines_did_at_most_decides_and_what_lies_between_their_steps_takes_as_long_as_it_does(
    clock, seconds, busy, at_most, hidden
):
    book = Ledger(overlaps=True)
    stats = RolloutStats(1, 8, 100, seconds, 80, 240, 160, busy_seconds=busy)
    for _ in range(4):
        book.waits()
        clock.now += 0.1
        book.works()
        clock.now += 9.9
        book.rolled_out(stats, at_most / _DOUBT)
    assert book.hidden is hidden


def test_rollouts_that_are_waited_for_again_are_seen_in_two_phases_and_less_changes_nothing(clock):
    book = Ledger(overlaps=True)
    for _ in range(3):
        overlapping(book, clock, 0.2, 9.8, 5.0, 1.0)
    assert book.hidden
    for waits in (1.2, 6.0, 0.2, 6.0, 1.2, 1.2):  # between the two limits; a validation now and then
        overlapping(book, clock, waits, 10.0 - waits, 3.0, 1.0)
        assert book.hidden
    overlapping(book, clock, 3.0, 7.0, 9.0, 1.0)
    overlapping(book, clock, 3.0, 7.0, 9.0, 1.0)
    assert not book.hidden
    for phase in range(3):
        assert not book.hidden, phase
        overlapping(book, clock, 0.2, 9.8, 5.0, 1.0)
    assert book.hidden


@pytest.mark.parametrize(
    ("seconds", "accepted", "hidden"), [(4.0, 0, True), (4.0, 100, True), (6.0, 100, False), (9.9, 0, True)]
)
def test_where_no_step_was_timed_a_drafted_one_is_no_shorter_than_a_plain_one(clock, seconds, accepted, hidden):
    """Of 100 forwards: with 100 accepted tokens it can have taken twice as long without drafts, and no more."""
    book = Ledger(overlaps=True)
    stats = RolloutStats(1, 8, 200, seconds, 100, 300, accepted)
    for _ in range(4):
        book.waits()
        clock.now += 0.1
        book.works()
        clock.now += 9.9
        book.rolled_out(stats, None)
    book.close()
    assert book.hidden is hidden and "spec/saved_s" not in book.metrics()


def test_of_several_engines_the_one_that_would_be_waited_for_longest_decides(clock: Clock) -> None:
    """Each has a tail of its own: a mean over engines is no bound of what the slowest would have taken."""
    book = Ledger(overlaps=True)
    plain, drafted = rollout(5.0), replace(rollout(5.0), drafts=80, accepted_tokens=160)
    for _ in range(6):
        book.waits()
        clock.now += 0.1
        book.works()
        clock.now += 8.0
        book.rolled_out(replace(plain, parts=(plain, drafted)), 2.0)
    assert not book.hidden
    for _ in range(6):
        book.waits()
        clock.now += 0.1
        book.works()
        clock.now += 8.0
        book.rolled_out(replace(plain, parts=(plain, plain)), 1.1)
    assert book.hidden


def reading(recomputed: int, *steps: StepTiming) -> RolloutStats:
    """Ten seconds, of which four steps of eight requests read 320 tokens of prompts for four."""
    mixed = (mixed_steps(8, 3, True, 4.0, 4, 8), mixed_steps(8, 3, False, 2.0, 4, 8))
    return replace(rollout(10.0), steps=steps + mixed, prompt_tokens=320, recomputed_tokens=recomputed)


def test_what_vllm_drops_of_the_prefix_cache_costs_no_more_than_its_share_of_what_reading_took():
    decoding = StepTiming(8, 3, False, 0.25, 10), StepTiming(1, 0, False, 0.01, 10)
    assert reading(80, *decoding).recomputing_seconds == pytest.approx((4.0 - 4 * 0.25) / 4)
    assert reading(80).recomputing_seconds == pytest.approx(1.0), "nothing is known of decoding: all of these steps"
    assert reading(0, *decoding).recomputing_seconds == 0.0
    assert reading(80, StepTiming(8, 3, False, 9.0, 10)).recomputing_seconds == 0.0, "never less than nothing"


@pytest.mark.parametrize(("times_as_long", "saved"), [(1.6, 5.0), (1.0, -1.0), (None, -1.0)])
def test_it_is_taken_from_what_drafts_save_also_of_a_phase_without_them(clock, times_as_long, saved):
    book = Ledger()
    book.waits()
    clock.now += 10.0
    book.rolled_out(reading(80), times_as_long)
    book.close()
    assert book.metrics()["spec/saved_s"] == pytest.approx(saved)
    assert book.metrics()["spec/net_s"] == pytest.approx(saved)


def test_of_engines_side_by_side_the_one_counts_that_recomputed_longest(clock):
    book = Ledger()
    book.waits()
    clock.now += 10.0
    both = replace(reading(160), parts=(reading(80), reading(0)))
    book.rolled_out(both, 1.0)
    book.close()
    assert book.metrics()["spec/saved_s"] == pytest.approx(-1.0)
