"""What drafts earn and cost: the seconds of a step, told by a clock that the test winds."""

from __future__ import annotations

import pytest

from spec_plugin import ledger as module
from spec_plugin.events import RolloutStats, StepTiming
from spec_plugin.ledger import Ledger, decoding_seconds


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


def rollout(seconds: float, steps: int = 100, k: int = 3, drafts: int | None = None, engines: int = 1) -> RolloutStats:
    """A phase of ``seconds`` whose engines decoded all of it in steps of 8 requests."""
    timing = StepTiming(8, k, k == 0, seconds / steps, steps)
    drafts = 8 * steps * engines * (k > 0) if drafts is None else drafts
    return RolloutStats(1, 8, 100, seconds, drafts, steps=(timing,) * engines, engines=engines)


def test_decoding_is_what_the_steps_took_in_each_engine_and_never_more_than_the_phase():
    assert decoding_seconds(rollout(10.0)) == pytest.approx(10.0)
    assert decoding_seconds(rollout(10.0, engines=3)) == pytest.approx(10.0)
    half = rollout(10.0, steps=50)
    seen = RolloutStats(1, 8, 100, 10.0, half.drafts * 2, steps=(StepTiming(8, 3, False, 0.1, 50),))
    assert decoding_seconds(seen) == pytest.approx(10.0), "half of the verification steps were timed, 5 s"
    assert decoding_seconds(RolloutStats(1, 8, 100, 10.0)) == 0.0, "nothing was timed"
    assert decoding_seconds(rollout(10.0, drafts=10**6)) == pytest.approx(10.0)


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
            "spec/saved_total_s": 12.0,
            "spec/cost_total_s": 3.5,
            "spec/net_total_s": 8.5,
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
    assert found["spec/cost_s"] == 2.0 and found["spec/net_total_s"] == pytest.approx(-3.0)
    book.close()
    assert book.metrics()["spec/cost_s"] == 0.0, "a step in which nothing was done"


def test_what_fails_was_spent_all_the_same(clock):
    book = Ledger()
    with pytest.raises(KeyError), book.spending():
        clock.now += 3.0
        raise KeyError
    book.close()
    assert book.metrics()["spec/cost_s"] == 3.0


def overlapping(book: Ledger, clock: Clock, waits: float, works: float, decodes: float, times_as_long: float) -> None:
    """A weight sync, a wait for rollouts, the trainer's own work, and the next sync."""
    book.waits()
    clock.now += waits
    book.works()
    clock.now += works
    book.close()
    book.waits()
    clock.now += 1.0  # sending weights is no wait for rollouts
    book.rolled_out(rollout(decodes, k=3 * (times_as_long != 1.0)), times_as_long)
    book.waits()


@pytest.mark.parametrize(
    ("waits", "works", "decodes", "times_as_long", "saved", "hidden"),
    [
        (4.0, 5.0, 10.0, 1.6, 6.0, False),  # the engines decode all of the time: all of it is exposed
        (0.2, 8.8, 7.0, 1.6, 1.2, False),  # hidden with drafts, 1.2 s longer than the phase without
        (0.2, 8.8, 5.0, 1.1, 0.0, True),  # hidden with drafts and without
        (0.2, 8.8, 5.0, 1.0, 0.0, True),  # a plain phase
        (0.2, 8.8, 5.0, 0.9, -0.5, True),  # drafts only cost
        (4.0, 5.0, 5.0, 1.0, 0.0, False),  # it waits for something else, tools say: not known to be hidden
    ],
)
def test_behind_the_trainers_own_work_only_what_would_stand_out_is_saved(
    clock, waits, works, decodes, times_as_long, saved, hidden
):
    book = Ledger(overlaps=True)
    for phase in range(4):
        assert book.hidden is (hidden and phase > 2), "three phases in a row say it"
        overlapping(book, clock, waits, works, decodes, times_as_long)
    book.close()
    assert book.metrics()["spec/saved_s"] == pytest.approx(saved)
    assert book.hidden is hidden


def test_rollouts_that_are_waited_for_again_are_seen_in_one_phase_and_a_little_changes_nothing(clock):
    book = Ledger(overlaps=True)
    for _ in range(3):
        overlapping(book, clock, 0.2, 8.8, 5.0, 1.0)
    assert book.hidden
    overlapping(book, clock, 1.2, 7.8, 6.0, 1.0)
    assert book.hidden, "between the two limits"
    overlapping(book, clock, 3.0, 6.0, 9.0, 1.0)
    assert not book.hidden
    for _ in range(2):
        overlapping(book, clock, 0.2, 8.8, 5.0, 1.0)
    assert not book.hidden
    overlapping(book, clock, 0.2, 8.8, 5.0, 1.0)
    assert book.hidden


def test_a_phase_of_which_nothing_is_known_says_nothing_of_waiting(clock):
    book = Ledger(overlaps=True)
    for _ in range(5):
        book.waits()
        clock.now += 9.0
        book.rolled_out(rollout(5.0), None)
    assert not book.hidden
