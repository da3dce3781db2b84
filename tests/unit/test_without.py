"""How long decoding would have taken without drafts: against rollouts whose truth is known."""

from __future__ import annotations

import random

import pytest

from spec_plugin.builtin.break_even.cost import tokens_per_step
from spec_plugin.builtin.break_even.without import times_as_long
from spec_plugin.events import RolloutStats, StepTiming

CHANCES = (0.8, 0.7, 0.6, 0.5)


class Cost:
    """A step takes 10 ms and 1 ms for each request; drafting adds a fifth a token, reading a tenth."""

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        plain = 0.010 + 0.001 * batch
        return plain * (1.0 + 0.2 * k + (0.1 if not paused or k else 0.0))


def rollout(
    ks: dict[int, int], chances: tuple[float, ...], busy: float = 1.0, seed: int = 0
) -> tuple[RolloutStats, float]:
    """One of 8 requests that drains, with k by batch size (-1: the draft is paused), and its true time without drafts.

    Args:
        ks: k for each batch size.
        chances: of each position to be accepted.
        busy: all steps take so many times as long.
        seed: of the random tokens.
    """
    rng, cost = random.Random(seed), Cost()
    steps, accepted, drafts, without = [], 0, 0, 0.0
    for batch in range(8, 0, -1):
        k, count = max(0, ks[batch]), 200
        for _ in range(count * batch):
            if k:
                drafts += 1
                made = 0
                while made < k and rng.random() < chances[min(made, len(chances) - 1)]:
                    made += 1
                accepted += made
        paused = ks[batch] < 0
        steps.append(StepTiming(batch, k, paused, busy * cost.seconds(batch, k, paused), count))
        without += busy * count * tokens_per_step(chances, k) * cost.seconds(batch, 0)
    seconds = sum(s.seconds * s.steps for s in steps)
    stats = RolloutStats(1, 8, 1000, seconds, drafts, 0, accepted, steps=tuple(steps))
    return stats, without / seconds


@pytest.mark.parametrize("busy", [1.0, 3.0])
@pytest.mark.parametrize(
    "ks",
    [dict.fromkeys(range(9), 3), {b: 4 if b < 4 else 1 for b in range(9)}, {b: 3 if b < 4 else 0 for b in range(9)}],
)
def test_the_truth_is_found_whatever_k_and_however_busy_the_machine(ks, busy):
    stats, truth = rollout(ks, CHANCES, busy)
    assert times_as_long(stats, Cost(), CHANCES) == pytest.approx(truth, rel=0.01)
    assert truth > 1.1


def test_what_was_accepted_counts_and_not_what_was_expected():
    stats, truth = rollout(dict.fromkeys(range(9), 3), (0.4,))
    assert times_as_long(stats, Cost(), CHANCES) == pytest.approx(truth, rel=0.01)
    assert times_as_long(stats, Cost(), ()) == pytest.approx(truth, rel=0.01), "nor where nothing was"


def test_drafts_that_are_never_right_and_reading_cost_what_they_cost():
    assert times_as_long(rollout(dict.fromkeys(range(9), 3), (0.0,))[0], Cost(), CHANCES) == pytest.approx(1 / 1.7)
    assert times_as_long(rollout(dict.fromkeys(range(9), 0), (0.0,))[0], Cost(), CHANCES) == pytest.approx(1 / 1.1)
    assert times_as_long(rollout(dict.fromkeys(range(9), -1), (0.0,))[0], Cost(), CHANCES) == 1.0


def test_of_a_rollout_without_timed_steps_nothing_is_known():
    assert times_as_long(RolloutStats(1, 8, 1000, 5.0, 100, 300, 200), Cost(), CHANCES) is None
