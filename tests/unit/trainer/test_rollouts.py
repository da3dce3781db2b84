"""Which rollouts are remembered: some of the last visits of each prompt, and of an epoch that is too long the same prompts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_plugin.api import rollouts
from spec_plugin.api.rollouts import LatestRollouts, Rollout


def test_a_rollout_counts_the_tokens_of_both_parts() -> None:
    assert Rollout(b"\0" * 12, b"\0" * 8).tokens == 5


def test_the_last_two_visits_of_a_prompt_are_kept() -> None:
    latest = LatestRollouts(1000)
    for phase, number in enumerate((0, 1)):
        assert latest.add(b"p", 10 * number, 5, phase) == latest.add(b"p", 10 * number + 1, 5, phase) == []
    assert latest.add(b"p", 20, 5, 2) == [(b"p", 0), (b"p", 1)]
    assert latest.add(b"p", 21, 5, 2) == []
    assert [number for _, number in latest] == [10, 11, 20, 21] and latest.tokens == 20


def test_of_a_large_group_the_last_to_end_are_kept() -> None:
    latest = LatestRollouts(1000)
    dropped = [latest.add(b"p", number, 5, 0) for number in range(6)]
    assert dropped == [[], [], [], [], [(b"p", 0)], [(b"p", 1)]]


@pytest.mark.parametrize(("room", "found"), [(10, 10), (5, 5), (2, 2)])
def test_of_an_epoch_that_is_too_long_some_prompts_are_always_found(room: int, found: int) -> None:
    """Ten prompts in turn, one a phase: whoever keeps the latest finds none of them again."""
    latest = LatestRollouts(5 * room)
    prompts = [bytes([i]) for i in range(10)]
    for phase in range(50):
        known = {prompt for prompt, _ in latest}
        if phase >= 10 and phase % 10 == 0:
            assert len(known & set(prompts)) == found
        latest.add(prompts[phase % 10], phase, 5, phase)
        assert latest.tokens <= 5 * room
    assert all(phase >= 40 for _, phase in latest), "what is kept of them is the newest"


def test_a_prompt_that_does_not_come_back_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_FORGOTTEN", 3)
    latest = LatestRollouts(10)
    latest.add(b"a", 0, 5, 0)
    latest.add(b"b", 1, 5, 2)
    assert latest.add(b"c", 2, 5, 3) == [(b"c", 2)], "there is no room"
    assert latest.add(b"c", 3, 5, 4) == [(b"a", 0)], "a is forgotten"
    assert latest.add(b"d", 4, 11, 4) == [(b"d", 4)], "one longer than all there may be is not kept"
    assert [number for _, number in latest] == [1, 3]


@given(st.integers(0, 10_000), st.integers(1, 60))
@settings(deadline=None)
def test_what_is_kept_and_what_is_dropped_is_all_there_was(seed: int, most: int) -> None:
    rng, latest, there = random.Random(seed), LatestRollouts(most), {}
    for number in range(60):
        prompt, tokens = rng.choice([b"a", b"b", b"c"]), rng.randint(1, 9)
        there[number] = (prompt, tokens)
        for of, old in latest.add(prompt, number, tokens, number // 7):
            assert there.pop(old)[0] == of
        assert {n: p for p, n in latest} == {n: p for n, (p, _) in there.items()}
        assert latest.tokens == sum(t for _, t in there.values()) <= most
