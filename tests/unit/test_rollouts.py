"""Which rollouts are remembered: the last visits of each prompt, the prompts that were used last, and no more than asked."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from spec_plugin.rollouts import Latest, Rollout


def test_a_rollout_counts_the_tokens_of_both_parts() -> None:
    assert Rollout(b"\0" * 12, b"\0" * 8).tokens == 5


def test_the_last_two_visits_of_a_prompt_are_kept() -> None:
    latest = Latest(1000)
    for phase, number in enumerate((0, 1)):
        assert latest.add(b"p", 10 * number, 5, phase) == latest.add(b"p", 10 * number + 1, 5, phase) == []
    assert latest.add(b"p", 20, 5, 2) == [(b"p", 0), (b"p", 1)]
    assert latest.add(b"p", 21, 5, 2) == []
    assert [number for _, number in latest] == [10, 11, 20, 21] and latest.tokens == 20


def test_the_prompt_that_was_used_longest_ago_goes_first() -> None:
    latest = Latest(10)
    latest.add(b"a", 0, 5, 0)
    latest.add(b"b", 1, 5, 0)
    latest.add(b"a", 2, 5, 1)
    assert [number for _, number in latest] == [0, 2], "b was used longest ago"
    assert latest.tokens == 10
    assert latest.add(b"c", 3, 11, 2) == [(b"a", 0), (b"a", 2), (b"c", 3)], (
        "one longer than all there may be is not kept"
    )
    assert latest.tokens == 0 and not list(latest)


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_what_is_kept_and_what_is_dropped_is_all_there_was(seed: int, most: int) -> None:
    rng, latest, there = random.Random(seed), Latest(most), {}
    for number in range(60):
        prompt, tokens = rng.choice([b"a", b"b", b"c"]), rng.randint(1, 9)
        there[number] = (prompt, tokens)
        for of, old in latest.add(prompt, number, tokens, number // 7):
            assert there.pop(old)[0] == of
        assert {n: p for p, n in latest} == {n: p for n, (p, _) in there.items()}
        assert latest.tokens == sum(t for _, t in there.values()) <= most
