"""Draft training takes what pays: less when it no longer raises acceptance, more when acceptance falls."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from spec_plugin.policy.pace import LEAST, WINDOW, Pace

NOISE = 0.02


def after(rise: float, rng: random.Random) -> float:
    """The share after two windows, between whose means acceptance rises by this."""
    pace = Pace()
    pace.share = 0.5
    for i in range(2 * WINDOW):
        pace.judged(3.0 * (1.0 + rise * i / WINDOW) * (1.0 + rng.gauss(0.0, NOISE)))
    return pace.share


@pytest.mark.parametrize(
    ("rise", "halved", "doubled"), [(0.03, (0.0, 0.05), (0.0, 0.001)), (0.0, (0.7, 0.9), (0.0, 0.05))]
)
def test_what_is_cut_short_and_what_is_not_noticed(rise, halved, doubled):
    rng = random.Random(0)
    shares = [after(rise, rng) for _ in range(2000)]
    print(f"rise {rise:.0%}: {shares.count(0.25) / 2000:.1%} halved, {shares.count(1.0) / 2000:.1%} doubled")
    assert halved[0] <= shares.count(0.25) / 2000 <= halved[1]
    assert doubled[0] <= shares.count(1.0) / 2000 <= doubled[1]


def run(
    steps: int, rng: random.Random, moves: float, jump_at: int = -1, most: float = math.inf
) -> list[tuple[float, float]]:
    """(acceptance length, share) of each step of a draft that training draws to 4 tokens, while a policy that moves undoes it."""
    pace, length, out = Pace(), 1.5, []
    for step in range(steps):
        length += 0.15 * pace.share * (4.0 - length) - moves * (length - 1.0)
        length = 2.0 if step == jump_at else length
        pace.judged(length * (1.0 + rng.gauss(0.0, NOISE)), most)
        out.append((length, pace.share))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_the_share_falls_at_rest_and_rises_when_the_policy_turns(seed):
    steps = run(160, random.Random(seed), moves=0.0, jump_at=100)
    assert all(share == 1.0 for _, share in steps[:15]), "it learns"
    assert min(share for _, share in steps[48:100]) == LEAST, "it has learnt"
    assert max(share for _, share in steps[100:124]) >= 2 * LEAST, "acceptance had fallen"
    assert steps[-1][0] > 3.5, "it has learnt again"


@pytest.mark.parametrize("seed", range(20))
def test_what_accepts_nearly_all_is_trained_least_at_once_and_more_when_it_falls(seed):
    steps = run(160, random.Random(seed), moves=0.0, jump_at=100, most=4.0)
    reached = next(i for i, (length, _) in enumerate(steps) if length >= 0.93 * 4.0)
    assert all(share == 1.0 for length, share in steps[:reached] if length < 0.84 * 4.0), "it learns"
    assert statistics.fmean(share for _, share in steps[reached + 4 : 100]) <= 1.1 * LEAST, "it has learnt"
    assert max(share for _, share in steps[100:132]) >= 2 * LEAST, "acceptance had fallen"
    assert steps[-1][0] > 3.4, "it has learnt again"


def test_a_draft_that_falls_soon_after_it_was_at_the_top_is_trained_more_again():
    pace, shares = Pace(), []
    for acceptance in [8.5] * 4 + [8.4] * 4 + [7.1] * 28:
        pace.judged(acceptance, 9.0)
        shares.append(pace.share)
    assert shares[3] == LEAST and shares[7] == LEAST and max(shares[8:]) >= 2 * LEAST


@pytest.mark.parametrize(
    ("moves", "at_most", "at_least"), [(0.0, 0.45, 0.999), (0.003, 0.62, 0.975), (0.01, 0.78, 0.965)]
)
def test_a_policy_that_moves_gets_as_much_as_keeps_up(moves, at_most, at_least):
    """Mean share and acceptance of 20 runs, against what all of the share would hold."""
    runs = [run(400, random.Random(seed), moves)[100:] for seed in range(20)]
    share = statistics.fmean(share for steps in runs for _, share in steps)
    length = statistics.fmean(length for steps in runs for length, _ in steps)
    held = (0.15 * 4.0 + moves) / (0.15 + moves)
    print(f"moves {moves}: {share:.2f} of the share, {length / held:.3f} of the acceptance")
    assert LEAST <= share <= at_most
    assert length >= at_least * held


def test_the_share_stays_within_its_bounds():
    pace = Pace()
    for _ in range(10 * WINDOW):
        pace.judged(3.0)
    assert pace.share == LEAST
    length = 3.0
    for _ in range(10 * WINDOW):
        length *= 0.99
        pace.judged(length)
    assert pace.share == 1.0
