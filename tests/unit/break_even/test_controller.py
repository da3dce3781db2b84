from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
from builders.controller import SEQS, K, controller, promised, refreshed, rolled_out, timed
from builders.steps import mixed_steps

from spec_plugin import SpecConfig
from spec_plugin.api.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    SelfTestReport,
    StepPair,
    StepTiming,
    TargetInfo,
)
from spec_plugin.api.method import Method
from spec_plugin.policy.break_even.controller import BreakEvenController
from spec_plugin.policy.break_even.states import REST
from spec_plugin.step_cost.chances import tokens_per_step


def on(c: BreakEvenController) -> bool:
    return any(c.spec_schedule(1).table)


def test_noise_around_break_even_does_not_make_it_flap():
    c = controller(
        {batch: 2.0 for batch in (4, 6, 7, 8)}
    )  # of a band that was not measured as a whole, more is guessed
    refreshed(c, 2.3)
    decisions = []
    for acceptance in (2.05, 2.01, 2.08, 2.02):
        decisions.append(on(c))
        rolled_out(c, acceptance)
    assert decisions == [True] * 4


def test_a_new_draft_waits_until_training_predicts_that_it_pays():
    c = controller({8: 2.0})
    assert not on(c)
    refreshed(c, None)  # untrained
    assert not on(c)
    refreshed(c, 1.5)
    assert not on(c)
    refreshed(c, 2.5)
    assert on(c)


def test_a_draft_that_the_user_brought_is_tried_for_one_phase_and_then_judged():
    c = controller({8: 2.0}, draft="/some/draft")
    assert c.spec_schedule(0).table == (0,) + (K,) * SEQS
    rolled_out(c, 1.4)
    assert not on(c)


def test_law_7_a_brought_draft_that_lost_is_not_tried_again_before_it_has_been_trained():
    c = controller({8: 2.0}, draft="/some/draft", train=False)
    assert on(c)
    rolled_out(c, 1.4)
    phases = []
    for _ in range(4):
        refreshed(c, None)
        phases.append(on(c))
        rolled_out(c, None)
    assert phases == [False] * 4


@pytest.mark.parametrize(("showed", "served"), [(1.05, True), (1.4, False)])
def test_a_brought_draft_that_knew_nothing_is_served_as_soon_as_training_says_that_it_knows_something(showed, served):
    c = controller({8: 2.0}, draft="/some/draft")
    assert on(c), "it is tried"
    rolled_out(c, showed)
    refreshed(c, None)
    assert not on(c), "nothing new is known of it"
    refreshed(c, 3.5)
    assert on(c) == served, "what the engine has seen of a draft that knows a little says more than training"


def test_law_7_a_newborn_draft_that_was_praised_in_vain_is_not_believed_at_once():
    c = controller({8: 2.0})
    refreshed(c, 3.5)
    assert on(c)
    rolled_out(c, 1.02)
    refreshed(c, 3.5)
    assert not on(c)


def test_law_7_a_draft_is_never_served_below_break_even_whatever_training_predicts():
    c = controller({8: 2.0})
    refreshed(c, 3.5)
    assert on(c)
    rolled_out(c, 1.5)  # the engine says otherwise
    refreshed(c, 3.5)
    assert not on(c)
    rolled_out(c, None)
    refreshed(c, 3.5)  # and the prediction is discounted by what the engine showed
    assert tokens_per_step(c.acceptance_curve, 3) == pytest.approx(1 + 2.5 * 0.5 / 2.5)
    assert not on(c)


def test_a_refused_refresh_predicts_nothing():
    c = controller({8: 2.0})
    refreshed(c, 3.5, installed=False)
    assert not on(c)


def test_a_phase_with_few_drafts_says_nothing():
    c = controller({8: 2.0})
    refreshed(c, 3.0)
    assert on(c)
    rolled_out(c, 1.0001, drafts=10)
    assert on(c)


def test_a_misaligned_draft_is_warned_about_once(caplog):
    caplog.set_level(logging.WARNING, logger="spec_plugin")
    c = controller({8: 1.2})
    for _ in range(3):
        refreshed(c, 3.5)
        on(c)
        rolled_out(c, 1.9)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert "1.90" in messages[0] and "3.50" in messages[0]


def test_a_draft_that_keeps_its_promise_is_not_warned_about(caplog):
    c = controller({8: 1.2})
    refreshed(c, 3.5)
    on(c)
    rolled_out(c, 3.2)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]  # decisions are said, too


def test_serve_always_and_never_ask_nobody():
    assert controller({8: 9.0}, serve="always").spec_schedule(0).table == (0,) + (K,) * SEQS
    c = controller({8: 1.0}, serve="never")
    refreshed(c, 4.0)
    assert c.spec_schedule(0).table == (0,) * (SEQS + 1)


def test_without_any_break_even_nothing_is_served():
    c = controller(None)
    refreshed(c, 4.0)
    assert not on(c)


# the cost model in charge


def phase(rate: float, k: int = 0, acceptance: float | None = None, batch: int = 8) -> RolloutStats:
    """A phase of 1000 tokens at this many tokens per second."""
    drafts = 1000 if acceptance else 0
    accepted = round(((acceptance or 1.0) - 1.0) * drafts)
    steps = (StepTiming(batch, k, k == 0, 1.0 if k == 0 else 2.0, 100),)
    return RolloutStats(1, 8, 1000, 1000 / rate, drafts, k * drafts, accepted, steps=steps)


@pytest.mark.parametrize("factor", [0.0, float("nan"), 100.0])
def test_law_7_a_wrong_cost_model_leaves_the_run_at_plain_speed(factor):
    c = controller()
    wrong = [
        StepTiming(t.batch, t.k, t.paused, factor * t.seconds if t.k == 0 else t.seconds, 10) for t in timed({8: 1.2})
    ]
    c.spec_engine_ready(SelfTestReport((), 1.0, tuple(wrong)))
    refreshed(c, 3.9)
    assert not on(c)


def test_timings_that_contradict_each_other_do_not_lock_speculation_off():
    """A try under the guard shows what drafting takes; nothing else would."""
    c = controller()
    wrong = tuple(
        StepTiming(t.batch, t.k, t.paused, 9 * t.seconds if t.k == 0 else t.seconds, 10) for t in timed({8: 1.2})
    )
    c.spec_engine_ready(SelfTestReport((), 1.0, wrong))
    refreshed(c, 3.9)
    right = tuple(StepTiming(t.batch, t.k, t.paused, t.seconds, 100) for t in timed({8: 1.2}))
    decisions = []
    for _ in range(14):
        schedule = c.spec_schedule(1)
        decisions.append(any(schedule.table))
        if decisions[-1]:
            assert set(schedule.break_even) == {1.5} or c.cost.problem is None
        truth = right if any(decisions) else wrong
        steps = truth if decisions[-1] else tuple(t for t in truth if t.k == 0 and t.paused)
        drafts = 1000 * decisions[-1]
        c.spec_rollout_end(RolloutStats(1, 8, 1000, 10.0, drafts, K * drafts, round(2.5 * drafts), steps=steps))
    assert decisions[:REST] == [False] * REST and decisions[REST] and decisions[-1]


def test_a_batch_size_that_was_timed_wrongly_and_never_comes_again_does_not_lock_speculation_off():
    c = controller(draft="/some/draft")
    wrong = tuple(StepTiming(1, t.k, t.paused, 9 * t.seconds if t.k == 0 else t.seconds, 10) for t in timed({1: 1.2}))
    c.spec_engine_ready(SelfTestReport((), 1.0, (*timed({8: 1.2}), *wrong)))
    assert c.cost.problem is None and on(c)


def test_a_draft_that_is_not_served_is_tried_now_and_then_under_the_guard():
    c = controller({1: 1.3, 8: 3.0})
    refreshed(c, 1.001)
    seen = []
    for _ in range(20):
        schedule = c.spec_schedule(1)
        seen.append(any(schedule.table))
        if seen[-1]:
            assert schedule.break_even[1] == pytest.approx(1.1 * 1.3, rel=0.1), "in a try a draft must clear a margin"
            assert schedule.break_even[8] == pytest.approx(1.1 * 3.0, rel=0.1)
        rolled_out(c, 1.0 if seen[-1] else None)
    assert [phase for phase, drafts in enumerate(seen) if drafts] == [REST, 2 * REST + 1]


def test_a_draft_that_the_engine_dropped_is_told_and_not_served_again(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    c = controller({8: 1.5})
    refreshed(c, 3.5)
    assert on(c)
    steps = (StepTiming(8, K, False, 1.5, 10), StepTiming(8, 0, True, 1.0, 100))
    c.spec_rollout_end(RolloutStats(4, 8, 900, 115.0, 80, 240, 4, steps=steps))
    assert "policy version 4: dropped the draft within the rollout, at 1.05 tokens per forward" in caplog.text
    assert c.spec_metrics()["spec/dropped"] == 1.0
    refreshed(c, 3.5)
    assert not on(c)


def test_a_draft_that_was_asked_for_throughout_is_never_dropped():
    for options in ({"serve": "always"}, {"serve": "never"}):
        assert controller({8: 1.5}, **options).spec_schedule(0).break_even == ()
    c = controller(serve="always", k=2)
    for _ in range(5):
        assert c.spec_schedule(0).table == (0,) + (2,) * SEQS
        c.spec_rollout_end(phase(50.0, 2, 1.1))


def test_one_line_is_logged_when_the_choice_changes(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    c = controller({8: 1.2})
    for expected in (1.01, 3.0, 3.01):
        refreshed(c, expected)
        c.spec_schedule(7)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(
        "spec-plugin: policy version 7: k=3 for batch size from 1 (acceptance length 3.00 at k=3, predicted"
    )


def test_later_positions_that_a_smaller_k_never_drafted_are_not_held_against_them():
    c = controller({8: 1.2})
    refreshed(c, 3.0)
    c.spec_schedule(1)
    steps = (StepTiming(8, 3, False, 1.2, 10), StepTiming(8, 1, False, 1.2, 30))
    c.spec_rollout_end(RolloutStats(1, 8, 1000, 1.0, 320, 0, 304, (256, 32, 16), steps=steps))
    # 0.8 of the first positions; of the second ones, which a quarter of the drafts had, 32 of 64; of the third 16 of 32
    assert c.acceptance_curve == pytest.approx((0.8, 0.5, 0.5))


def drafted(c: BreakEvenController, k: int, chance: float, past_end: tuple[int, ...] = ()) -> None:
    """A phase of 1000 verification steps at batch size 8, whose drafted tokens are all accepted with this chance.

    Args:
        c: hears of it.
        k: drafted.
        chance: of each position.
        past_end: tokens accepted at each position that no response had room for.
    """
    accepted = [round(1000 * chance ** (i + 1)) for i in range(k)]
    steps = (StepTiming(8, k, False, 1.2, 125),)
    stats = RolloutStats(1, 8, 1000, 1.0, 1000, 1000 * k, sum(accepted), tuple(accepted), steps=steps)
    c.spec_rollout_end(replace(stats, past_end_per_pos=past_end))


def test_law_7_tokens_accepted_beyond_the_ends_of_responses_are_worth_nothing_and_none_is_drafted_for_them():
    c = controller({8: 1.2}, k=8, draft="/some/draft", train=False)
    on(c)
    drafted(c, 4, 0.9, (90, 405, 729))
    # before the ends lay 0.9 of the first ones, half of the second, and none of the third
    assert c.acceptance_curve[:3] == pytest.approx((0.9 * 0.9, 0.9 * 0.5 / 0.9, 0.0), abs=0.01)
    assert tokens_per_step(c.acceptance_curve, 8) == pytest.approx(1 + 0.81 + 0.405, abs=0.01)
    assert max(c.spec_schedule(1).table) <= 3, "k=3 was in force, and is no more than a little worse than 2"
    drafted(c, 1, 0.9, (90,))
    assert tokens_per_step(c.acceptance_curve, 8) == pytest.approx(1 + 0.81 + 0.405, abs=0.01), "it is known of others"


def test_a_draft_whose_tokens_come_too_late_is_not_taken_for_one_that_knows_nothing_or_is_misaligned(caplog):
    c = controller({8: 1.2})
    promised(c, (0.9, 0.9, 0.9))
    on(c)
    drafted(c, 3, 0.9, (850, 810, 729))
    assert not c.acceptance_estimate.knows_nothing
    assert not caplog.records
    promised(c, (0.9, 0.9, 0.9))
    assert tokens_per_step(c.acceptance_curve, 3) < 1.1, "what the engine has seen says more than what is promised"


def test_nothing_is_promised_beyond_what_training_unrolls_and_the_engine_finds_out():
    c = controller({8: 1.2}, k=8)
    promised(c, (0.9, 0.9))
    assert tokens_per_step(c.acceptance_curve, 8) == pytest.approx(1 + 0.9 + 0.81)
    on(c)
    drafted(c, 2, 0.9)
    assert tokens_per_step(c.acceptance_curve, 8) == pytest.approx(
        sum(0.9**i for i in range(9)), rel=0.01
    )  # worth a look


def test_what_training_knows_of_later_positions_stays_known_while_a_smaller_k_is_drafted():
    c = controller({8: 1.2}, k=8)
    promised(c, (0.9, 0.9, 0.9, 0.2))
    on(c)
    drafted(c, 2, 0.8)
    assert c.acceptance_curve == pytest.approx((0.8, 0.8, 0.9, 0.2))


def test_what_an_earlier_phase_showed_of_later_positions_is_not_forgotten():
    """Else a frozen draft would be drafted too far in every second phase."""
    c = controller({8: 1.2}, k=8, draft="/some/draft", train=False)
    on(c)
    drafted(c, 4, 0.5)
    drafted(c, 2, 0.8)
    assert c.acceptance_curve == pytest.approx((0.8, 0.8, 0.5, 0.5), abs=0.01)


def test_of_a_draft_that_became_much_better_later_positions_are_looked_at_again():
    c = controller({8: 1.2}, k=8, draft="/some/draft", train=False)
    on(c)
    drafted(c, 4, 0.1)
    drafted(c, 2, 0.8)
    assert c.acceptance_curve == pytest.approx((0.8, 0.8), abs=0.01)


def test_a_prediction_is_compared_with_the_engine_as_far_as_both_have_looked(caplog):
    caplog.set_level(logging.WARNING, logger="spec_plugin")
    c = controller({8: 1.2}, k=8)
    promised(c, (0.9,) * 8)
    on(c)
    drafted(c, 2, 0.9)  # of 8 positions two were drafted, and these keep the promise
    promised(c, (0.9,) * 8)
    on(c)
    assert not caplog.records


def test_what_was_measured_of_other_proposals_says_nothing_of_these():
    c = controller({8: 1.2}, k=8)
    promised(c, (0.5,) * 8, draft_temperature=1.0)
    on(c)
    drafted(c, 8, 0.2)
    promised(c, (0.6,) * 8, draft_temperature=1.0)
    assert c.acceptance_curve[0] < 0.3, "of the same proposals the engine has seen less than training promises"
    promised(c, (0.6,) * 8, draft_temperature=0.7)
    assert c.acceptance_curve[:8] == (0.6,) * 8
    on(c)
    drafted(c, 8, 0.55)
    promised(c, (0.7,) * 8, draft_temperature=0.85, installed=False)
    assert c.acceptance_curve[0] < 0.6, "the engine goes on with the draft, and the temperature, of before"


def born(seconds: float = 10.0, version: int = 0, **options: object) -> BreakEvenController:
    """After a first phase without drafts, of so many seconds; drafting pays from 1.2 tokens a step."""
    c = controller({8: 1.2}, **options)
    c.spec_refreshed(DraftRefresh(version, 0, {}, "", ()), RefreshReport(True, 0, "", 1.0))
    c.spec_schedule(0)
    c.spec_rollout_end(RolloutStats(0, 8, 1000, seconds, 0, 0, 0, steps=(StepTiming(8, 0, True, 1.0, 125),)))
    return c


def test_a_newborn_draft_may_learn_for_longer_once_and_no_longer_than_a_rollout():
    c = born()
    assert c.spec_head_start() == pytest.approx(
        10.0
    )  # at 2.5 tokens a step the rollout would take half: 15 s in 3 steps
    assert c.spec_metrics()["spec/head_start_ms"] == pytest.approx(10_000)
    assert c.spec_head_start() == 0.0, "all that was granted"
    assert c.spec_metrics()["spec/head_start_ms"] == 0.0


def test_no_more_is_granted_than_pays_back_within_three_steps():
    c = born(head_start=10.0)
    granted = c.spec_head_start()
    assert 10.0 < granted < 3 * 10.0 * (1 - 1 / 2.53)


def test_a_draft_that_cannot_pay_gets_no_head_start():
    c = controller({8: 3.0})  # 0.7 a token is 2.5 tokens a step
    c.spec_refreshed(DraftRefresh(0, 0, {}, "", ()), RefreshReport(True, 0, "", 1.0))
    c.spec_rollout_end(RolloutStats(0, 8, 1000, 10.0, 0, 0, 0, steps=(StepTiming(8, 0, True, 1.0, 125),)))
    assert c.spec_head_start() == 0.0


def test_a_draft_that_is_good_enough_brought_resumed_or_not_asked_for_gets_no_head_start():
    good = born()
    promised(good, (0.9, 0.9, 0.9))
    brought = born(draft="/some/draft")
    for c in (good, brought, born(version=7), born(serve="always"), born(serve="never")):
        assert c.spec_head_start() == 0.0
    assert controller({8: 1.2}).spec_head_start() == 0.0, "nothing is known of the rollouts"


@pytest.mark.parametrize(("acceptance", "granted"), [(1.02, True), (2.5, False)])
def test_a_draft_that_was_brought_gets_one_if_its_try_shows_that_it_knows_nothing(acceptance, granted):
    c = controller({8: 1.2}, draft="d")
    c.spec_refreshed(DraftRefresh(0, 0, {}, "", ()), RefreshReport(True, 0, "", 1.0))
    assert any(c.spec_schedule(0).table), "it is tried in the first phase"
    assert c.spec_head_start() == 0.0, "and until then believed to be good"
    c.spec_rollout_end(phase(100.0, K, acceptance))
    assert bool(c.spec_head_start()) == granted


def test_a_draft_that_no_training_predicts_is_not_forgotten_over_phases_that_say_nothing_of_it():
    c = controller({8: 1.2}, draft="d")
    c.spec_refreshed(DraftRefresh(0, 0, {}, "", ()), RefreshReport(True, 0, "", 1.0))
    c.spec_schedule(0)
    c.spec_rollout_end(phase(100.0, K, 3.0))
    few = RolloutStats(1, 8, 40, 1.0, 5, 5 * K, 10, (5, 3, 2), (StepTiming(8, K, False, 0.2, 2),))
    for silent in (phase(50.0), few, phase(50.0)):
        c.spec_schedule(1)
        c.spec_rollout_end(silent)
        assert any(c.spec_schedule(2).table), "it was worth 2.5 times plain decoding when it was last seen"


def test_a_draft_that_no_training_predicts_is_tried_again_where_the_first_try_showed_too_little():
    """N-grams of a policy's first words are few: fewer than a measurement takes."""
    c = controller({8: 1.2}, draft="d")
    c.spec_refreshed(DraftRefresh(0, 0, {}, "", ()), RefreshReport(True, 0, "", 1.0))
    few = RolloutStats(1, 8, 40, 1.0, 5, 5 * K, 10, (5, 3, 2), (StepTiming(8, K, False, 0.2, 2),))
    assert any(c.spec_schedule(0).table)
    c.spec_rollout_end(few)
    rested = 0
    while not any(c.spec_schedule(1).table):
        c.spec_rollout_end(phase(50.0))
        rested += 1
        assert rested <= REST, "docs/explain/how-it-works.md: an unused draft is tried now and then"
    assert rested > 1
    c.spec_rollout_end(phase(100.0, K, 3.0))
    assert any(c.spec_schedule(2).table), "and served, where it is worth it"


def test_what_training_promises_of_a_newer_draft_replaces_what_was_measured_of_the_one_before():
    c = controller({8: 1.2})
    promised(c, (0.9, 0.9, 0.9))
    on(c)
    drafted(c, 3, 0.05)
    assert not on(c)
    c.spec_rollout_end(phase(100.0))
    promised(c, (0.9, 0.9, 0.9))
    assert c.acceptance_curve is not None and c.acceptance_curve[0] != pytest.approx(0.05, abs=0.01)


def test_what_the_engine_would_have_accepted_replaces_what_it_accepted_before():
    c = controller({8: 1.2}, draft="d")
    c.spec_schedule(0)
    c.spec_rollout_end(phase(100.0, K, 1.05))
    c.spec_schedule(1)
    plain = phase(100.0)
    c.spec_rollout_end(replace(plain, shadow_rounds=200, shadow_per_pos=(180, 160, 150)))
    assert any(c.spec_schedule(2).table)


def test_once_it_was_served_there_is_no_head_start_any_more():
    c = born(head_start=10.0)
    promised(c, (0.9, 0.9, 0.9))
    on(c)
    drafted(c, 2, 0.1)
    promised(c, (0.1,))
    assert c.spec_head_start() == 0.0


def test_metrics_tell_what_was_chosen_expected_and_realised():
    c = controller({1: 1.2, 8: 1.2})
    refreshed(c, 3.0)
    assert c.spec_schedule(1).table == (0,) + (K,) * SEQS
    assert "spec/speedup_realised" not in c.spec_metrics(), "nothing was drafted yet"
    c.spec_rollout_end(replace(phase(100.0, K, 3.0), pairs=(StepPair(8, K, 2.0, 1.0),) * 20))
    found = c.spec_metrics()
    assert found["spec/break_even_b8"] == pytest.approx(1.2, rel=0.5)
    assert found["spec/speedup_predicted"] == pytest.approx(2.5, rel=0.1)
    assert found["spec/speedup_realised"] == pytest.approx(1.5, rel=0.05), "3 tokens in twice the time"


def test_a_look_up_is_judged_by_all_forward_passes_not_by_those_that_had_a_draft():
    """What n-gram shows on reasoning text: 2.2 by vLLM's count, 1.03 tokens per forward."""
    c = BreakEvenController()
    target = TargetInfo(path="", hf_config={}, dtype="float32", max_num_seqs=SEQS)
    c.spec_configure(SpecConfig.parse({"k": K}), target, Method("lookup", {}, pretrained=True, variable_length=True))
    c.spec_engine_ready(SelfTestReport((), 1.0, timed({8: 1.2})))
    assert on(c), "ready: tried before anything was trained"
    drafts, accepted = 250, 300
    steps = (StepTiming(8, K, False, 1.2, 1250),)
    stats = RolloutStats(1, 8, 10_300, 1500.0, drafts, K * drafts, accepted, (150, 100, 50), steps)
    assert stats.acceptance_length == 2.2 and stats.tokens_per_forward == 1.03
    c.spec_rollout_end(stats)
    assert not on(c)


def test_an_engine_that_keeps_states_is_compared_by_whole_rollouts_now_and_then():
    c = controller({8: 1.2}, draft="d")
    c.spec_configure(
        c._config,
        TargetInfo("", {"architectures": ["Qwen3NextForCausalLM"]}, "float32", max_num_seqs=SEQS),
        c._method,
    )
    c.spec_engine_ready(SelfTestReport((), 1.0, timed({8: 1.2})))
    chosen = []
    for _ in range(60):
        chosen.append(on(c))
        c.spec_rollout_end(phase(100.0, K, 3.0) if chosen[-1] else phase(100.0))
    plain = [version for version, drafts in enumerate(chosen) if not drafts]
    assert plain and all(b - a > 16 for a, b in pairwise(plain)), "2 % of the time at 1.5 times the speed"
    assert c.spec_metrics()["spec/speedup_realised"] == pytest.approx(1.5, rel=0.2), (
        "3 tokens in steps of twice the time"
    )


def test_answers_of_a_few_tokens_are_compared_by_whole_rollouts_too():
    c = controller({8: 1.2}, draft="d")
    chosen = []
    for _ in range(40):
        chosen.append(on(c))
        c.spec_rollout_end(phase(3.0, K, 3.0) if chosen[-1] else phase(3.0))
    plain = [version for version, drafts in enumerate(chosen) if not drafts]
    assert plain and plain[0] >= 8 and all(b - a > 16 for a, b in pairwise(plain)), plain


def test_a_plain_share_is_asked_for_only_where_drafts_are_chosen_by_what_they_gain():
    c = controller({8: 1.2}, draft="d")
    assert c.spec_schedule(0).plain_share == 0.25, "nothing is known"
    c.spec_rollout_end(phase(100.0, K, 3.0))
    assert 0.0 < c.spec_schedule(1).plain_share < 0.1
    for options in ({"serve": "always"}, {"serve": "never"}):
        assert controller({8: 1.2}, draft="d", **options).spec_schedule(0).plain_share == 0.0


def test_what_a_rollout_would_have_taken_without_drafts_is_told_if_what_steps_cost_is_known():
    plain = RolloutStats(1, 8, 1000, 10.0, steps=(StepTiming(8, 0, True, 0.05, 100),))
    drafted = RolloutStats(1, 8, 1000, 10.0, 800, 2400, 1600, steps=(StepTiming(8, K, False, 0.05, 100),))
    c = controller({8: 2.0})
    assert c.spec_slowdown_without_drafts(plain) == 1.0
    rolled_out(c, None)
    refreshed(c, 3.5)
    assert c.spec_slowdown_without_drafts(drafted) == pytest.approx(3.0 / 2.0, rel=0.05)
    unknown = BreakEvenController()
    assert unknown.spec_slowdown_without_drafts(plain) == 1.0 and unknown.spec_slowdown_without_drafts(drafted) is None


@pytest.mark.parametrize(("plain", "of_drafts"), [(12.0, 4.0), (2.0, 24.0)])
def test_a_pair_that_a_burst_has_spoilt_is_not_taken_for_what_was_saved(plain, of_drafts):
    c = controller({8: 2.0})
    on(c)
    # the machine takes twice as long as at start-up
    usual = RolloutStats(1, 8, 1000, 400.0, 800, 2400, 1600, (640, 560, 400), (StepTiming(8, K, False, 4.0, 100),))
    one = replace(usual, pairs=(StepPair(8, K, of_drafts, plain),))
    c.spec_rollout_end(one)
    assert c.spec_slowdown_without_drafts(one) < 1.05 * 3.0 / 2.0
    many = replace(usual, pairs=one.pairs * 7)
    c.spec_rollout_end(many)
    told, truth = c.spec_slowdown_without_drafts(many), 3.0 * plain / of_drafts
    if truth < 1.0:
        assert told == pytest.approx(truth, rel=0.3), "what many say is no burst"
    else:
        assert 1.1 * 3.0 / 2.0 < told <= truth, (
            "what many say is no burst, and what is always beside it may be the run's own work"
        )


def test_where_no_two_steps_are_alike_what_drafting_has_saved_and_what_is_accepted_is_known_all_the_same():
    """One request of eight is of the control group, in each of the steps that drafts three tokens; those with one are alike."""
    c = controller({8: 2.0})
    on(c)
    steps = (StepTiming(8, 1, False, 2.0, 10), mixed_steps(8, K, False, 180.0, 90, 90 * 7))
    forwards, reached = 80 + 630, (568, 315, 315)  # 0.8 of all, then half of those that drafted three
    stats = RolloutStats(1, 8, 1000, 200.0, forwards, 0, sum(reached), reached, steps)
    c.spec_rollout_end(stats)
    assert c.acceptance_curve == pytest.approx((0.8, 0.625, 1.0), rel=0.01), "of those that drafted so many"
    assert 0.9 < c.spec_slowdown_without_drafts(stats) < 1.8
