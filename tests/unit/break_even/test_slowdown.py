"""How long decoding would have taken without drafts: against rollouts whose truth is known."""

from __future__ import annotations

import random

import pytest
from builders.steps import mixed_steps

from spec_plugin.api.events import RolloutStats, StepTiming
from spec_plugin.policy.break_even.plan import slowdown_without
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import StepCost

CHANCES = (0.8, 0.7, 0.6, 0.5)


class Cost(StepCost):
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
    assert slowdown_without(stats, Cost(), CHANCES) == pytest.approx(truth, rel=0.01)
    assert truth > 1.1


def test_what_was_accepted_counts_and_not_what_was_expected():
    stats, truth = rollout(dict.fromkeys(range(9), 3), (0.4,))
    assert slowdown_without(stats, Cost(), CHANCES) == pytest.approx(truth, rel=0.01)
    assert slowdown_without(stats, Cost(), ()) == pytest.approx(truth, rel=0.01), "nor where nothing was"


def test_drafts_that_are_never_right_and_reading_cost_what_they_cost():
    assert slowdown_without(rollout(dict.fromkeys(range(9), 3), (0.0,))[0], Cost(), CHANCES) == pytest.approx(1 / 1.7)
    assert slowdown_without(rollout(dict.fromkeys(range(9), 0), (0.0,))[0], Cost(), CHANCES) == pytest.approx(1 / 1.1)
    assert slowdown_without(rollout(dict.fromkeys(range(9), -1), (0.0,))[0], Cost(), CHANCES) == 1.0


def test_of_a_rollout_without_timed_steps_nothing_is_known():
    assert slowdown_without(RolloutStats(1, 8, 1000, 5.0, 100, 300, 200), Cost(), CHANCES) is None


def mixed_rollout(
    drafted: int,
    *,
    busy: float = 1.0,
    drafts_less: float = 1.0,
    prompts: float = 0.0,
    reading: int = 100,
    places: int = 8,
) -> tuple[RolloutStats, float]:
    """One of some requests at a time, so many of which have a draft of 3 tokens, and what it takes without drafts, over that.

    Args:
        drafted: of these, always others.
        busy: all steps take so many times as long.
        drafts_less: drafted steps take less than the cost model says by this factor.
        prompts: seconds of reading, in some of the steps.
        reading: how many of the 400 steps these are.
        places: requests at a time.
    """
    cost, tokens = Cost(), tokens_per_step(CHANCES, 3)
    plain = cost.seconds(places, 0)
    # verified are fewer tokens, but the draft's passes are for all: three, each of which takes what reading does
    step = busy * drafts_less * (plain * 1.3 + drafted / places * (cost.seconds(places, 3) - plain * 1.3))
    mixed = [mixed_steps(places, 3, False, (400 - reading) * step, 400 - reading, (400 - reading) * drafted)]
    mixed += [mixed_steps(places, 3, True, reading * (step + busy * prompts), reading, reading * drafted)]
    drafts = 400 * drafted
    stats = RolloutStats(1, 8, 1000, 1.0, drafts, 0, round(drafts * (tokens - 1.0)), steps=tuple(mixed))
    made = 400 * (1.0 + drafted / places * (tokens - 1.0))
    return stats, busy * (made * plain + reading * prompts) / sum(m.total for m in mixed)


@pytest.mark.parametrize("busy", [1.0, 3.0])
@pytest.mark.parametrize("drafted", [4, 6, 7, 8])
@pytest.mark.parametrize("prompts", [0.0, 0.02, 0.2])
def test_where_no_two_steps_are_alike_about_the_truth_is_found_and_rather_too_little(drafted, busy, prompts):
    stats, truth = mixed_rollout(drafted, busy=busy, prompts=prompts)
    assert 0.8 * truth < slowdown_without(stats, Cost(), CHANCES) <= 1.01 * truth


@pytest.mark.parametrize("busy", [1.0, 3.0])
@pytest.mark.parametrize(
    ("drafted", "places", "reading", "prompts"),
    [(7, 8, 200, 0.005), (7, 8, 320, 0.005), (1020, 1024, 40, 0.05), (1020, 1024, 380, 0.05)],
)
def test_steps_that_read_prompts_beside_their_drafts_count_too(drafted, places, reading, prompts, busy):
    """48 short responses in 8 places: whenever one ends, another's prompt is read. Half of it was told as not saved.

    Of 1024 places and long responses, too: behind the first tenth of a rollout some request ends in nearly each step.
    """
    stats, truth = mixed_rollout(drafted, busy=busy, prompts=prompts, reading=reading, places=places)
    assert 0.9 * truth < slowdown_without(stats, Cost(), CHANCES) <= 1.01 * truth
    assert truth > 1.4


def test_among_several_k_a_step_that_is_not_alike_counts_with_the_requests_that_had_a_draft():
    """Few steps of k=1 are alike and all of k=3: what the rollout has shown is of all of them."""
    rng = random.Random(0)
    made = {k: [0] * 3000 for k in (1, 3)}
    for k, each in made.items():
        for i in range(len(each)):
            while each[i] < k and rng.random() < CHANCES[each[i]]:
                each[i] += 1
    accepted = sum(map(sum, made.values()))
    steps = (StepTiming(1, 3, False, 0.02, 3000), StepTiming(6, 1, False, 0.02, 10))
    mixed = (mixed_steps(8, 1, False, 9.8, 490, 2940),)
    stats = RolloutStats(1, 8, 1000, 1.0, 6000, 0, accepted, steps=steps + mixed)
    told = slowdown_without(stats, Cost(), CHANCES)
    cost = Cost()
    plain = 3000 * 0.02 * tokens_per_step(CHANCES, 3) * cost.seconds(1, 0) / cost.seconds(1, 3)
    plain += 10 * 0.02 * tokens_per_step(CHANCES, 1) * cost.seconds(6, 0) / cost.seconds(6, 1)
    plain += 9.8 * (1 + 2940 / 490 / 8 * CHANCES[0]) * cost.seconds(8, 0) / cost.seconds(8, 1)
    assert told == pytest.approx(plain / (3010 * 0.02 + 9.8), rel=0.02)


def test_steps_without_a_draft_save_nothing_whatever_busy_moments_have_been_measured():
    """Seen in a run of long responses: plain steps were timed beside other work, the others not, and a phase without a single
    draft was said to have saved 126 s.
    """

    class Busy(Cost):
        def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
            return super().seconds(batch, k, paused, context) * (1.7 if paused and not k else 1.0)

    stats = RolloutStats(1, 8, 1000, 5.0, steps=(StepTiming(8, 0, False, 0.05, 100),))
    assert slowdown_without(stats, Busy(), CHANCES) == 1.0
    assert slowdown_without(stats, Cost(), CHANCES) < 1.0, "the draft's own pass is still counted"
