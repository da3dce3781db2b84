"""The draft is measured within a share of the time for training, however dear that is, and in the end always."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin.policy.held_out import FIRST, LEAST, MOST, SHARE, HeldOut

#: of an engine that proposes a draft's likeliest tokens
GREEDY: Any = SimpleNamespace(sampling=None, judged=lambda found: found)


class Dear:
    """A draft whose measurement takes so many seconds a token."""

    ranks = 1

    def __init__(self, token_seconds: float) -> None:
        self.token_seconds, self.seconds = token_seconds, 0.0

    def evaluate(self, parts: Any, k: int, context: int, sampling: Any) -> Any:
        tokens = sum(map(len, parts()))
        self.seconds += tokens * self.token_seconds
        return SimpleNamespace(tokens=tokens, seconds=tokens * self.token_seconds, rounds=tokens // 3)


def measured(token_seconds: float, slice_seconds: float, slices: int) -> tuple[list[int], float]:
    """On how many tokens in each slice, and which share of all slices' time that took from the second one on."""
    held_out, draft, found = HeldOut(GREEDY), Dear(token_seconds), []
    for _ in range(slices):
        tokens = held_out.tokens(slice_seconds)
        held_out.measure(draft, 8, lambda n=tokens: [range(n)])  # type: ignore[arg-type]
        found.append(tokens)
    return found, (draft.seconds - FIRST * token_seconds) / (slice_seconds * slices)


@pytest.mark.parametrize("token_seconds", [1e-6, 1e-4, 1.9e-3, 0.02, 0.5])
def test_measuring_takes_its_share_of_the_time_for_training_and_no_more(token_seconds: float) -> None:
    """1.9 ms is what a real run took, of 1.6 s: from its second step on nothing was left to train."""
    tokens, share = measured(token_seconds, 1.6, 2000)
    assert share <= SHARE * 1.001 and tokens[0] == FIRST
    assert all(n == 0 or LEAST <= n <= MOST for n in tokens)
    every = math.ceil(LEAST * token_seconds / (SHARE * 1.6))  # slices that pay for it
    assert sum(n > 0 for n in tokens[1:]) >= 0.95 * 1999 / every - 1


def test_where_it_costs_little_as_much_is_measured_as_is_worth_it() -> None:
    assert measured(1e-5, 2.0, 10)[0][1:] == [MOST] * 9


def test_time_put_aside_does_not_pile_up() -> None:
    held_out, draft = HeldOut(GREEDY), Dear(1e-3)
    held_out.measure(draft, 8, lambda: [range(256)])  # type: ignore[arg-type]
    for _ in range(1000):
        held_out.tokens(100.0)
    assert held_out._put_aside <= MOST * 1e-3 * 1.001
