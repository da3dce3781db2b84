from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from spec_plugin.engine.vllm.schedule.cutoff import DraftCutoff, undrafted_beside_drafts

SIZE = 32


def watched(break_even: float | tuple[float, ...], tokens, batch: int = 8, most: int = 100_000) -> int | None:
    """After how many verification steps of one request the draft is dropped; None if it is not."""
    floor = break_even if isinstance(break_even, tuple) else (break_even,) * (SIZE + 1)
    cutoff = DraftCutoff([3] * (SIZE + 1), floor)
    for n in range(1, most):
        cutoff.emitted(batch, tokens())
        if cutoff.due:
            return n
    return None


def sampled(mean: float, k: int = 3, seed: int = 0):
    """Tokens of verification steps with this acceptance length."""
    rng = random.Random(seed)
    return lambda: 1 + sum(rng.random() < (mean - 1) / k for _ in range(k))


def test_law_7_a_worthless_draft_costs_a_phase_a_bounded_number_of_tokens():
    assert watched(1.5, lambda: 1) == 65  # half a token behind at each, 32 allowed
    assert watched(1.0625, lambda: 1) == 513
    assert watched(4.0, lambda: 1) == 64  # enough drafts that the controller learns the acceptance


def test_law_7_a_draft_that_stops_paying_is_dropped_whatever_it_gained_before():
    good, bad = [4] * 5000, [1] * 100
    drops = watched(1.5, iter(good + bad).__next__, most=5101)
    assert drops is not None and drops <= 5000 + 65


def test_a_draft_that_pays_is_kept():
    assert [watched(1.5, sampled(2.0, seed=s), most=20_000) for s in range(5)] == [None] * 5


def test_law_7_a_draft_a_little_below_break_even_is_dropped_in_the_end():
    assert all(watched(1.5, sampled(1.4, seed=s), most=5000) for s in range(5))


@pytest.mark.parametrize(
    ("answers", "places", "chance", "k", "break_even"),
    [(6, 256, 0.8, 3, 1.8), (6, 128, 0.97, 3, 1.5), (10, 128, 0.97, 7, 2.0)],
)
def test_a_draft_that_pays_is_kept_where_all_requests_end_in_the_same_step(answers, places, chance, k, break_even):
    """Short answers of one length, eight batches of which wait their turn: a step in which most end makes little."""
    for seed in range(4):
        rng, waiting = random.Random(seed), 8 * places
        cutoff = DraftCutoff([k] * (places + 1), (break_even,) * (places + 1))
        left: list[int] = []
        made = steps = 0
        while waiting or left:
            new = min(places - len(left), waiting)
            waiting -= new
            reached = []
            for length in left:
                tokens = 1
                while tokens <= k and rng.random() < chance:
                    tokens += 1
                cutoff.emitted(len(left) + new, min(tokens, length))
                made, steps = made + min(tokens, length), steps + 1
                reached.append(length - tokens)
            assert not cutoff.due
            left = [length for length in reached if length > 0] + [answers - 1] * new
        assert made / steps > 1.2 * break_even


def test_each_batch_size_has_its_own_break_even():
    floor = (1.0, 1.1, *(3.0,) * (SIZE - 1))
    assert watched(floor, lambda: 2, batch=1, most=5000) is None
    assert watched(floor, lambda: 2, batch=16, most=5000) == 64
    assert watched(floor, lambda: 2, batch=1000, most=5000) == 4 * SIZE  # beyond the table its end holds


def test_without_break_even_nothing_is_dropped():
    assert watched((), lambda: 1, most=5000) is None


@pytest.mark.parametrize("again", [False, True])
def test_what_is_dropped_stays_dropped(again):
    table = [0, 3, 3]
    cutoff = DraftCutoff(table, (1.0, 9.0, 9.0))
    for _ in range(100):
        cutoff.emitted(2, 1)
    assert cutoff.due
    assert cutoff.drop(), "nothing is drafted any more"
    assert table == [0, 0, 0]
    for _ in range(100 if again else 0):  # drafts that were under way
        cutoff.emitted(2, 1)
    assert not cutoff.due


def test_a_draft_that_is_too_dear_for_a_full_batch_is_kept_for_its_tail():
    table = [0, *[3] * 4, *[1] * 28]
    cutoff = DraftCutoff(table, (1.0, *[1.3] * 4, *[2.1] * 28))
    for _ in range(5000):
        cutoff.emitted(4, 4)  # a gain long ago says nothing
    while not cutoff.due:
        cutoff.emitted(32, 2)
    assert not cutoff.drop()
    assert table == [0, *[3] * 4, *[0] * 28]
    while not cutoff.due:
        cutoff.emitted(4, 1)  # watched further on
    assert cutoff.drop() and not any(table)


def test_law_7_each_drop_ends_drafting_at_some_batch_size():
    rng = random.Random(0)
    for _ in range(50):
        needed = [1.0, *(rng.uniform(1.0, 3.5) for _ in range(SIZE))]
        table = [0, *[3] * SIZE]
        cutoff = DraftCutoff(table, needed)
        tokens = sampled(rng.uniform(1.0, 2.0), seed=rng.randrange(1000))
        for _ in range(20_000):
            batch = rng.randrange(1, SIZE + 1)
            if table[batch]:
                cutoff.emitted(batch, tokens())
            if cutoff.due:
                before = sum(map(bool, table))
                cutoff.drop()
                assert sum(map(bool, table)) < before and not cutoff.due


def test_of_a_look_up_those_without_a_draft_are_counted_beside_those_with_one():
    def output(drafted):
        return SimpleNamespace(
            num_scheduled_tokens={"a": 3, "b": 1, "c": 1, "d": 40}, scheduled_spec_decode_tokens=drafted
        )

    assert undrafted_beside_drafts(output({"a": [1, 2]})) == 2
    assert undrafted_beside_drafts(output({})) == 0, "nobody paid for a draft"
