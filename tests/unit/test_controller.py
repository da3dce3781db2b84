from __future__ import annotations

import logging

import pytest

from spec_plugin import SpecConfig
from spec_plugin.controller import BreakEvenController, schedule_table
from spec_plugin.events import DraftRefresh, RefreshReport, RolloutStats, SelfTestReport, TargetInfo

K, SEQS = 3, 8


def controller(measured: dict[int, float] | None = None, /, **options: object) -> BreakEvenController:
    out = BreakEvenController()
    out.spec_configure(SpecConfig.parse(options), TargetInfo(path="", hf_config={}, dtype="float32", max_num_seqs=SEQS))
    if measured is not None:
        out.spec_engine_ready(SelfTestReport((), 1.0, measured))
    return out


def refreshed(c: BreakEvenController, expected: float | None, installed: bool = True) -> None:
    c.spec_refreshed(DraftRefresh(1, 1, {}, "", expected), RefreshReport(installed, 1, "", 1.0))


def rolled_out(c: BreakEvenController, acceptance: float | None, drafts: int = 1000) -> None:
    drafts = drafts if acceptance else 0
    accepted = round(((acceptance or 1.0) - 1.0) * drafts)
    c.spec_rollout_end(RolloutStats(1, 8, 1000, 1.0, drafts, K * drafts, accepted))


def on(c: BreakEvenController) -> bool:
    return any(c.spec_schedule(1))


def test_law_7_each_batch_size_is_decided_by_its_own_break_even():
    table = schedule_table(K, 2.0, {1: 1.2, 4: 1.6, 8: 2.5}, serving=True, max_num_seqs=10)
    assert table == (0, K, K, K, K, 0, 0, 0, 0, 0, 0)


def test_law_7_between_two_measured_batch_sizes_the_larger_ones_break_even_holds():
    assert schedule_table(K, 2.0, {1: 1.2, 4: 2.2}, True, 4) == (0, K, 0, 0, 0)


def test_beyond_the_largest_measured_batch_size_its_break_even_holds():
    assert schedule_table(K, 2.0, {2: 1.5}, True, 5) == (0,) + (K,) * 5


def test_switching_on_needs_a_margin_and_staying_on_does_not():
    assert not any(schedule_table(K, 2.05, {8: 2.0}, serving=False, max_num_seqs=8))
    assert any(schedule_table(K, 2.05, {8: 2.0}, serving=True, max_num_seqs=8))
    assert any(schedule_table(K, 2.15, {8: 2.0}, serving=False, max_num_seqs=8))


def test_law_7_at_break_even_exactly_speculation_is_off():
    assert not any(schedule_table(K, 2.0, {8: 2.0}, serving=True, max_num_seqs=8))


def test_noise_around_break_even_does_not_make_it_flap():
    c = controller({8: 2.0})
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
    assert c.spec_schedule(0) == (0,) + (K,) * SEQS
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


def test_law_7_a_draft_is_never_served_below_break_even_whatever_training_predicts():
    c = controller({8: 2.0})
    refreshed(c, 3.5)
    assert on(c)
    rolled_out(c, 1.5)  # the engine says otherwise
    refreshed(c, 3.5)
    assert not on(c)
    rolled_out(c, None)
    refreshed(c, 3.5)  # and the prediction is discounted by what the engine showed: 1 + 2.5 * 0.6 = 2.5 -> tried again
    assert c.acceptance == pytest.approx(1 + 2.5 * (0.5 + 0.5 * 0.5 / 2.5))


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
    assert not caplog.records


def test_serve_always_and_never_ask_nobody():
    assert controller({8: 9.0}, serve="always").spec_schedule(0) == (0,) + (K,) * SEQS
    c = controller({8: 1.0}, serve="never")
    refreshed(c, 4.0)
    assert c.spec_schedule(0) == (0,) * (SEQS + 1)


def test_a_break_even_that_the_user_set_is_not_replaced_by_the_measured_one():
    c = controller({1: 1.1, 8: 1.1}, break_even=3.0)
    refreshed(c, 2.9)
    assert not on(c)
    assert c.spec_metrics() == {"spec/on": 0.0, f"spec/break_even_b{SEQS}": 3.0}


def test_without_any_break_even_nothing_is_served():
    c = controller(None)
    refreshed(c, 4.0)
    assert not on(c)
