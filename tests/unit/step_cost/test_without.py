"""How long decoding would have taken without drafts: against rollouts whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from spec_plugin.events import MixedSteps, RolloutStats, StepTiming
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import StepCost
from spec_plugin.step_cost.without import OwnLoad, times_as_long, times_as_long_at_most

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
    assert times_as_long(stats, Cost(), CHANCES) == pytest.approx(truth, rel=0.01)
    assert truth > 1.1


def test_what_was_accepted_counts_and_not_what_was_expected():
    stats, truth = rollout(dict.fromkeys(range(9), 3), (0.4,))
    assert times_as_long(stats, Cost(), CHANCES) == pytest.approx(truth, rel=0.01)
    assert times_as_long(stats, Cost(), ()) == pytest.approx(truth, rel=0.01), "nor where nothing was"


def test_a_tail_that_is_drafted_better_than_the_rest_counts_as_what_it_was():
    """A rollout's last requests repeat themselves: half of its time, at a batch of one, and nearly all drafts accepted."""
    cost, full, alone = Cost(), 2.0, 3.9
    steps = (StepTiming(8, 3, False, cost.seconds(8, 3), 100), StepTiming(1, 3, False, cost.seconds(1, 3), 200))
    accepted = ((1, round(200 * (alone - 1))), (8, round(800 * (full - 1))))
    stats = RolloutStats(1, 8, 1000, 1.0, 1000, 3000, sum(n for _, n in accepted), steps=steps)
    stats = replace(stats, kept_by_batch=accepted)
    took = sum(s.seconds * s.steps for s in steps)
    truth = (100 * full * cost.seconds(8, 0) + 200 * alone * cost.seconds(1, 0)) / took
    assert times_as_long(stats, cost, CHANCES) == pytest.approx(truth)
    at_most = times_as_long_at_most(stats, cost, CHANCES)
    assert truth < at_most < 1.2 * truth, "the full batch counts as the rollout's mean, which is more than it made"
    by_the_mean = times_as_long_at_most(replace(stats, kept_by_batch=()), cost, CHANCES)
    assert by_the_mean < 0.9 * truth


def test_at_most_a_request_that_has_not_ended_makes_what_is_accepted():
    cost = Cost()
    steps = (StepTiming(8, 3, False, cost.seconds(8, 3), 100),)
    stats = RolloutStats(
        1, 8, 1000, 1.0, 800, 2400, 1600, steps=steps, kept_by_batch=((8, 1200),), past_end_per_pos=(0, 100, 300)
    )
    took = 100 * cost.seconds(8, 3)
    assert times_as_long(stats, cost, CHANCES) == pytest.approx(2.5 * 100 * cost.seconds(8, 0) / took)
    assert times_as_long_at_most(stats, cost, CHANCES) == pytest.approx(3.0 * 100 * cost.seconds(8, 0) / took)


def test_drafts_that_are_never_right_and_reading_cost_what_they_cost():
    assert times_as_long(rollout(dict.fromkeys(range(9), 3), (0.0,))[0], Cost(), CHANCES) == pytest.approx(1 / 1.7)
    assert times_as_long(rollout(dict.fromkeys(range(9), 0), (0.0,))[0], Cost(), CHANCES) == pytest.approx(1 / 1.1)
    assert times_as_long(rollout(dict.fromkeys(range(9), -1), (0.0,))[0], Cost(), CHANCES) == 1.0


def test_of_a_rollout_without_timed_steps_nothing_is_known():
    assert times_as_long(RolloutStats(1, 8, 1000, 5.0, 100, 300, 200), Cost(), CHANCES) is None


def mixed_rollout(
    drafted: int, *, busy: float = 1.0, drafts_less: float = 1.0, prompts: float = 0.0
) -> tuple[RolloutStats, float]:
    """One of 8 requests at a time, so many of which have a draft of 3 tokens, and what it takes without drafts, over that.

    Args:
        drafted: of the 8, always others.
        busy: all steps take so many times as long.
        drafts_less: drafted steps take less than the cost model says by this factor.
        prompts: seconds of reading, in a quarter of the steps.
    """
    cost, tokens = Cost(), tokens_per_step(CHANCES, 3)
    plain = cost.seconds(8, 0)
    # verified are fewer tokens, but the draft's passes are for all: three, each of which takes what reading does
    step = busy * drafts_less * (plain * 1.3 + drafted / 8 * (cost.seconds(8, 3) - plain * 1.3))
    mixed = [MixedSteps(8, 3, False, 300 * step, 300, 300 * drafted)]
    mixed += [MixedSteps(8, 3, True, 100 * (step + busy * prompts), 100, 100 * drafted)]
    drafts = 400 * drafted
    stats = RolloutStats(1, 8, 1000, 1.0, drafts, 0, round(drafts * (tokens - 1.0)), mixed=tuple(mixed))
    made = 400 * (1.0 + drafted / 8 * (tokens - 1.0))
    return stats, busy * (made * plain + 100 * prompts) / sum(m.seconds for m in mixed)


@pytest.mark.parametrize("busy", [1.0, 3.0])
@pytest.mark.parametrize("drafted", [4, 6, 7, 8])
@pytest.mark.parametrize("prompts", [0.0, 0.02, 0.2])
def test_where_no_two_steps_are_alike_the_truth_is_found_and_at_most_no_less(drafted, busy, prompts):
    stats, truth = mixed_rollout(drafted, busy=busy, prompts=prompts)
    told, at_most = times_as_long(stats, Cost(), CHANCES), times_as_long_at_most(stats, Cost(), CHANCES)
    assert told == pytest.approx(truth, rel=0.001), "prompts are read either way"
    # a request with a draft makes all of them, be the one that has none nobody's last
    longest = tokens_per_step(CHANCES, 3) / (1.0 + drafted / 8 * (tokens_per_step(CHANCES, 3) - 1.0))
    assert 0.999 * truth <= at_most <= 1.13 * longest * truth
    assert prompts or at_most >= 0.999 * longest * truth


@pytest.mark.parametrize(("busy", "drafts_less"), [(1.0, 0.6), (1.3, 0.6), (2.0, 1.0), (1.0, 1.2)])
def test_where_the_cost_model_has_timed_drafts_too_long_what_is_told_at_most_is_still_no_less_than_the_truth(
    busy, drafts_less
):
    stats, truth = mixed_rollout(7, busy=busy, drafts_less=drafts_less)
    at_most = times_as_long_at_most(stats, Cost(), CHANCES)
    assert at_most >= 0.999 * truth / busy, "by what plain steps take where the machine is as it was at start-up"
    assert at_most >= 0.999 * truth * min(1.0, drafts_less), "or beside these, where they took longer"


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
    mixed = (MixedSteps(8, 1, False, 9.8, 490, 2940),)
    stats = RolloutStats(1, 8, 1000, 1.0, 6000, 0, accepted, steps=steps, mixed=mixed)
    told = times_as_long(stats, Cost(), CHANCES)
    cost = Cost()
    plain = 3000 * 0.02 * tokens_per_step(CHANCES, 3) * cost.seconds(1, 0) / cost.seconds(1, 3)
    plain += 10 * 0.02 * tokens_per_step(CHANCES, 1) * cost.seconds(6, 0) / cost.seconds(6, 1)
    plain += 9.8 * (1 + 2940 / 490 / 8 * CHANCES[0]) * cost.seconds(8, 0) / cost.seconds(8, 1)
    assert told == pytest.approx(plain / (3010 * 0.02 + 9.8), rel=0.02)


def own_work(seconds: float, busy: float = 1.0) -> tuple[RolloutStats, float]:
    """A rollout beside whose steps the run itself works, as long as it would without drafts; and the truth."""
    stats, ratio = rollout(dict.fromkeys(range(9), 3), CHANCES, busy)
    took = sum(s.seconds * s.steps for s in stats.steps)
    longer = 1.0 + busy * seconds / took
    slowed = replace(stats, steps=tuple(replace(s, seconds=longer * s.seconds) for s in stats.steps))
    return slowed, (ratio * took + busy * seconds) / (took + busy * seconds)


@pytest.mark.parametrize("busy", [1.0, 2.0])
def test_the_runs_own_work_is_as_much_without_drafts_and_somebody_elses_load_is_as_long_as_the_rollout(busy):
    load = OwnLoad()
    assert load.factor == 1.0
    for others in (1.0, 3.0, 1.0, 1.5, 1.0, 2.0):
        load.note(own_work(40.0, others)[0], Cost(), CHANCES)
    stats, truth = own_work(40.0, busy)
    told = times_as_long(stats, Cost(), CHANCES, load.factor)
    assert told == pytest.approx(truth, rel=0.02) and told < 0.95 * times_as_long(stats, Cost(), CHANCES)


def test_of_rollouts_that_nothing_is_known_of_no_load_is_known():
    load = OwnLoad()
    load.note(RolloutStats(1, 8, 1000, 5.0, 100, 300, 200), Cost(), CHANCES)
    assert load.factor == 1.0


def test_steps_that_all_read_prompts_count_as_on_a_machine_as_usual_and_for_no_more_than_they_took():
    """Short answers that come and go: nothing tells how busy the machine was, so what is beyond usual counts as reading."""
    quick, (stats, _) = mixed_rollout(7)[1], mixed_rollout(7, busy=3.0)
    only = replace(stats, mixed=stats.mixed[1:])
    step = only.mixed[0].seconds / 3.0
    assert times_as_long(only, Cost(), CHANCES) == pytest.approx((quick + 2.0) / 3.0, rel=0.01)
    fast = replace(only, mixed=(replace(only.mixed[0], seconds=0.5 * step),))
    assert times_as_long(fast, Cost(), CHANCES) == pytest.approx(quick, rel=0.01)


def test_at_most_nothing_is_known_of_a_rollout_without_steps_and_of_prompts_alone_all_is_repeated():
    assert times_as_long_at_most(RolloutStats(1, 8, 1000, 5.0, 100, 300, 200), Cost(), CHANCES) is None
    stats = RolloutStats(1, 8, 1000, 5.0, 100, 300, 200, mixed=(MixedSteps(8, 3, True, 5.0, 100, 100),))
    assert times_as_long_at_most(stats, Cost(), CHANCES) == pytest.approx(3.0)


def test_steps_without_a_draft_save_nothing_whatever_busy_moments_have_been_measured():
    """Seen in a run of long responses: plain steps were timed beside other work, the others not, and a phase without a single
    draft was said to have saved 126 s.
    """

    class Busy(Cost):
        def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
            return super().seconds(batch, k, paused, context) * (1.7 if paused and not k else 1.0)

    stats = RolloutStats(1, 8, 1000, 5.0, steps=(StepTiming(8, 0, False, 0.05, 100),))
    assert times_as_long(stats, Busy(), CHANCES) == 1.0
    assert times_as_long(stats, Cost(), CHANCES) < 1.0, "the draft's own pass is still counted"
