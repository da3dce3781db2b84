from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from builders.cost import compute_bound, memory_bound, model, timings

from draft_training.acceptance import conditional_acceptance
from examples.bench.control import closed_form_speedup
from spec_plugin.api.events import StepTiming
from spec_plugin.policy.break_even.plan import break_even_of, phase_speedup
from spec_plugin.step_cost.chances import constant_acceptance, tokens_per_step
from spec_plugin.step_cost.model import Corrected, CostModel


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_model_agrees_with_leviathans_closed_form_where_its_assumptions_hold(alpha, draft, k):
    found = tokens_per_step([alpha], k) / model(memory_bound(draft)).break_even(1, k)
    assert found == pytest.approx(closed_form_speedup(alpha, k, draft), rel=0.02)


def test_the_closed_form_is_theorem_3_8():
    assert closed_form_speedup(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / (0.2 * 1.4))
    assert closed_form_speedup(1.0, 3, 0.0) == 4.0 and closed_form_speedup(0.0, 3, 0.1) == pytest.approx(1 / 1.3)


def test_where_tokens_cost_time_drafting_never_pays_however_good_the_draft():
    found = model(compute_bound)
    assert all(tokens_per_step([0.99], k) < found.break_even(b, k) for b in (8, 32, 64) for k in (1, 2, 3))
    assert found.break_even(32, 3) == pytest.approx(4.4 + 0.2, rel=0.03)


@pytest.mark.parametrize("seconds", [memory_bound(0.1), compute_bound])
def test_cells_that_were_not_measured_are_predicted(seconds):
    found = model(seconds, noise=0.02)
    for batch in (2, 5, 16, 24, 48):
        for k in (0, 1, 2, 3):
            assert found.seconds(batch, k) == pytest.approx(seconds(batch, k, k == 0), rel=0.15)


def test_a_step_at_k_0_costs_more_while_the_draft_is_not_paused():
    def seconds(batch, k, paused):
        return 0.010 + (0.0 if paused else 0.004) + 0.001 * max(0, k - 1)

    found = model(seconds)
    assert found.seconds(8, 0, paused=False) == pytest.approx(0.014, rel=0.05)
    assert found.seconds(8, 0) == pytest.approx(0.010, rel=0.02)


def test_a_prediction_beyond_all_measured_batch_sizes_goes_on_with_the_last_slope():
    found = model(compute_bound)
    assert found.seconds(256, 0) == pytest.approx(0.256, rel=0.1)


def test_outliers_do_not_bend_the_surface():
    found = CostModel()
    found.observe(
        [*timings(memory_bound(0.1), noise=0.01), StepTiming(16, 3, False, 1.0, 1), StepTiming(4, 0, True, 2.0, 1)]
    )
    assert found.seconds(12, 3) == pytest.approx(0.013, rel=0.15)


def test_later_rollouts_outweigh_earlier_ones():
    found = model(memory_bound(0.1))
    for _ in range(5):
        found.observe(timings(lambda *cell: 2 * memory_bound(0.1)(*cell), steps=100))
    assert found.seconds(8, 0) == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_timings_that_make_no_sense_are_left_out(bad):
    found = model(memory_bound(0.1))
    found.observe([StepTiming(1, 0, True, bad, 1000), StepTiming(8, 3, False, bad, 1000)])
    assert found.problem is None and found.seconds(1, 0) == pytest.approx(0.010, rel=0.02)


def test_a_model_without_plain_or_speculating_steps_says_so():
    found = CostModel()
    assert "no plain step" in found.problem
    found.observe([StepTiming(1, 0, True, 0.01, 10)])
    assert "no speculating step" in found.problem
    with pytest.raises(RuntimeError, match="seen no step"):
        CostModel().seconds(1, 0)


def test_plain_steps_that_seem_a_hundred_times_dearer_contradict_the_others():
    found = CostModel()
    found.observe([t if t.k else StepTiming(t.batch, 0, True, 100 * t.seconds, 50) for t in timings(memory_bound(0.1))])
    assert "contradict" in found.problem


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_batch_size_at_which_the_timings_contradict_themselves_is_left_out(batch):
    """Something else had the machine while its plain steps were timed: the other sizes say what a step takes."""

    def steps(slow: float) -> list[StepTiming]:
        kinds = [(b, k) for b in (1, 8, 32) for k in (0, 1, 3)]
        return [
            StepTiming(b, k, k == 0, (0.03 + 0.003 * b * (1 + k)) * (slow if (b, k) == (batch, 0) else 1), 12)
            for b, k in kinds
        ]

    right, wrong, rolled_out = CostModel(), CostModel(), CostModel()
    right.observe(steps(1.0), calibration=True)
    wrong.observe(steps(8.0), calibration=True)
    rolled_out.observe(steps(8.0))
    for learnt in (wrong, rolled_out):
        assert learnt.problem is None
        for b in (1, 8, 32):
            known = right.break_even(b, 3)
            assert 0.9 * known <= learnt.break_even(b, 3) < 2 * known, "rather too dear than too cheap"


def test_no_step_is_free_however_the_timings_contradict_each_other():
    kinds = [(b, k, p) for b in (1, 2, 3, 5, 8, 16) for k, p in ((0, True), (0, False), (3, False))]
    for seed in range(40):
        draw = random.Random(seed)
        model = CostModel()
        picked = draw.sample(kinds, 5)
        model.observe([StepTiming(*kind, 0.01 * draw.lognormvariate(0, 1), draw.choice((1, 40))) for kind in picked])
        if model.problem is not None:
            continue  # then nobody asks
        assert min(model.seconds(b, *kind) for b in (1, 2, 8, 100) for kind in ((0, True), (0, False), (3, False))) > 0


def test_tokens_per_step_and_its_inverse():
    assert tokens_per_step([0.8], 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert tokens_per_step([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    assert tokens_per_step([0.9], 0) == 1.0 and tokens_per_step([], 3) == 1.0
    for length in (1.0, 1.7, 2.952, 4.0):
        assert tokens_per_step([constant_acceptance(length, 3)], 3) == pytest.approx(length, abs=1e-6)


def test_conditional_acceptance_from_vllms_counts():
    assert conditional_acceptance([80, 64, 16], 100) == (0.8, 0.8, 0.25)
    assert conditional_acceptance([0, 0, 0], 100) == (0.0,)
    assert conditional_acceptance([], 0) == ()


# ---- contexts: the calibration knows short ones, and responses grow


def with_attention(batch, k, paused, context):
    """An 8B model on a GPU, about: 8 ms for the weights, 50 ns for each cached token of each request."""
    return 0.008 + 2e-5 * batch * (k + 1) + (0.0 if paused else 5e-4 * max(1, k)) + 5e-8 * batch * context


def at(context, kinds, batches=(1, 8, 32, 128), steps=50):
    return [
        StepTiming(b, k, paused, with_attention(b, k, paused, context), steps, context)
        for b in batches
        for k, paused in kinds
    ]


CALIBRATED = ((0, True), (1, False), (3, False))


def test_long_rollouts_do_not_contradict_a_calibration_at_short_contexts():
    """Plain steps of 128 requests at 8000 tokens take 60 ms where the calibration saw 10: the draft is not 6 times as fast."""
    found = CostModel()
    found.observe(at(30.0, CALIBRATED), calibration=True)
    for _ in range(3):
        found.observe(at(8000.0, ((0, True),)))
    assert found.problem is None
    for batch in (1, 8, 32, 128):
        for k in (1, 3):
            truth = with_attention(batch, k, False, 8000.0) / with_attention(batch, 0, True, 8000.0)
            assert found.break_even(batch, k) == pytest.approx(truth, rel=0.06)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_what_contexts_cost_is_learned_beside_all_else(noise):
    rng, found = random.Random(3), CostModel()
    found.observe(at(30.0, CALIBRATED), calibration=True)
    for phase in range(6):
        for context in (500.0, 2000.0, 6000.0):
            noisy = [
                StepTiming(t.batch, t.k, t.paused, t.seconds * rng.lognormvariate(0.0, noise), t.steps, t.context)
                for t in at(context, CALIBRATED if phase else ((0, True),), batches=(1, 8, 32))
            ]
            found.observe(noisy)
    context = 2000.0  # the median
    for k in (1, 3):
        truth = with_attention(32, k, False, context) / with_attention(32, 0, True, context)
        assert found.break_even(32, k) == pytest.approx(truth, rel=0.05 + noise)


def test_without_contexts_that_differ_nothing_is_said_of_them():
    plain, told = CostModel(), CostModel()
    plain.observe(timings(compute_bound))
    told.observe(
        [StepTiming(t.batch, t.k, t.paused, t.seconds, t.steps, 40.0 + t.batch / 4) for t in timings(compute_bound)]
    )
    assert told.seconds(8, 2) == plain.seconds(8, 2)


def test_one_phase_on_a_busy_machine_says_nothing_and_a_lasting_change_is_followed() -> None:
    model = CostModel()
    for _ in range(3):
        model.observe([StepTiming(8, 0, True, 0.04, 30), StepTiming(8, 3, False, 0.08, 10)])
    calm = model.seconds(8, 0)
    model.observe([StepTiming(8, 0, True, 0.4, 30)])
    assert model.seconds(8, 0) == pytest.approx(calm, rel=0.02)
    for _ in range(4):
        model.observe([StepTiming(8, 0, True, 0.06, 30), StepTiming(8, 3, False, 0.12, 10)])
    assert model.seconds(8, 0) == pytest.approx(0.06, rel=0.05)


def test_a_first_rollout_of_contexts_like_the_calibrations_says_only_how_its_kinds_of_steps_compare():
    """It is the slowest of all: nothing is warm yet."""
    model = CostModel()
    known = [replace(t, context=60.0) for t in timings(compute_bound)]
    model.observe(known, calibration=True)
    cold = tuple(StepTiming(b, 0, True, 1.25 * compute_bound(b, 0, True), 200, 100.0) for b in (4, 8))
    for found, t in zip(model.at_usual_speed(cold), cold, strict=True):
        assert found.seconds == pytest.approx(t.seconds / 1.25, rel=0.1)
    longer = tuple(replace(t, context=150.0) for t in cold)
    assert model.at_usual_speed(longer) == longer


def test_a_rollout_on_a_busy_machine_says_only_how_its_kinds_of_steps_compare():
    model = CostModel()
    model.observe(timings(compute_bound), calibration=True)
    quiet = tuple(StepTiming(b, 2, False, compute_bound(b, 2, False), 50, 300.0) for b in (2, 4, 8))
    assert model.at_usual_speed(quiet) == quiet, "the first rollout is taken as it is"
    model.observe(quiet)
    busy = tuple(replace(t, seconds=2.0 * t.seconds) for t in quiet)
    for found, expected in zip(model.at_usual_speed(busy), quiet, strict=True):
        assert found.seconds == pytest.approx(expected.seconds, rel=0.1)
    odd = (replace(busy[0], seconds=1.5 * busy[0].seconds), *busy[1:])
    assert model.at_usual_speed(odd)[0].seconds == pytest.approx(1.5 * quiet[0].seconds, rel=0.1)


def test_a_rollout_of_which_no_step_was_timed_changes_nothing() -> None:
    """As one whose requests all ran beside prompts, or in the control group."""
    model = CostModel()
    model.observe(timings(compute_bound), calibration=True)
    model.observe([StepTiming(8, 2, False, compute_bound(8, 2, False), 50, 300.0)])
    known = model.seconds(8, 2)
    assert model.at_usual_speed(()) == ()
    broken = (StepTiming(8, 2, False, math.nan, 3),)
    assert model.at_usual_speed(broken) == broken
    model.observe(())
    assert model.seconds(8, 2) == known


@pytest.mark.parametrize("slower", [0.95, 1.0, 1.1, 1.3, 2.0])
def test_law_7_what_a_full_batch_would_take_with_drafts_is_not_told_by_two_steps_that_are_nearly_alike(slower):
    """Calibrated up to 128 requests (1152 tokens with k=8), then a plain phase of 1024 on a machine that is slower."""

    def card(batch, k, paused):
        drafting = 0.0 if paused else max(1, k) * (0.8e-3 + 2e-6 * batch)
        return 10e-3 + 0.04e-3 * max(0, batch * (k + 1) - 256) + drafting

    cost = CostModel()
    cost.observe(timings(card, (1, 8, 32, 128), (0, 1, 8), noise=0.03, steps=16), calibration=True)
    cost.observe([StepTiming(b, 0, False, card(b, 0, False), 16) for b in (1, 8, 32, 128)], calibration=True)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 960, 1000, 1024)
    cost.observe([StepTiming(b, 0, True, slower * card(b, 0, True), 64, 4000.0) for b in sizes])
    true = card(1024, 1, False) / card(1024, 0, True)
    assert 0.85 * true < cost.break_even(1024, 1) < 1.15 * true
    true = card(64, 2, False) / card(
        64, 0, True
    )  # 192 tokens, which are computed while the weights are read: 384 are not
    assert 0.95 * true < cost.break_even(64, 2) < 1.08 * true


def test_law_7_what_small_batches_seem_to_add_in_a_noisy_rollout_is_not_what_the_full_one_would():
    """Of small batches drafts add next to nothing; where that drowns in noise, the full batch's eight tokens are no cheaper."""

    def card(batch, k, paused):
        reads = 0.0 if paused else (0.0008 + 2e-6 * batch) * max(1, k)
        return 0.010 + 4e-5 * max(0, batch * (k + 1) - 256) + reads

    cost = CostModel()
    cost.observe(timings(card, (1, 8, 32, 128), (0, 1, 8), noise=0.03, steps=16), calibration=True)
    sizes = (*range(1, 17), 24, 32, 64, 128, 512, 1024)
    cost.observe([StepTiming(b, 0, True, 1.25 * card(b, 0, True), 64, 300.0) for b in sizes])
    cost.observe([StepTiming(b, 3, False, 1.25 * card(b, 0, True), 64, 300.0) for b in sizes if b <= 16])
    assert cost.seconds(512, 8) > 0.5 * card(512, 8, False)
    assert cost.seconds(1024, 3) > 0.5 * card(1024, 3, False)


@pytest.mark.parametrize("factor", [0.1, 0.9, 1.0, 1.3])
def test_no_draft_is_predicted_to_gain_more_than_its_tokens_whatever_pairs_seem_to_show(factor):
    cost = Corrected(model(memory_bound(0.1)), factor)
    load, size = {1.0: 100.0, 8.0: 400.0}, 8
    for k in (1, 3):
        table = (0, *(k,) * size)
        tokens = tokens_per_step((0.11,), k)
        assert phase_speedup(cost, (0.11,), load, table) <= tokens * (1.0 + 1e-9)
        assert min(break_even_of(cost, table)) >= 1.0
        assert cost.seconds(4, k) == pytest.approx(float(cost.seconds_of(4, k)))
        assert cost.seconds(4, 0) == pytest.approx(float(cost.seconds_of(4, 0)))
