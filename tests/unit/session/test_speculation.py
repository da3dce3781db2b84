"""Each step logs whether it drafts and why or why not: the codes, the work whose failure each stands for, and a run's life."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from builders.controller import K, chosen, controller, refreshed, rolled_out, timed
from builders.paths import ROOT
from builders.recovery import Run
from builders.session import TARGET, raising, session_with

from spec_plugin import SpecConfig, hookimpl
from spec_plugin.api.events import EngineSchedule, RolloutStats, Schedule, StepPair
from spec_plugin.api.speculation import Reason, Speculation, in_force, in_words, state_of, table_metrics

S, R = Speculation, Reason


def logged(session) -> tuple[Speculation, Reason]:
    metrics = session.metrics()
    return Speculation(int(metrics["spec/state"])), Reason(int(metrics["spec/reason"]))


@pytest.mark.parametrize("codes", [Speculation, Reason])
def test_the_documents_tables_are_the_codes(codes):
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    part = text.partition("<!-- codes:begin -->")[2].partition("<!-- codes:end -->")[0]
    tables = [re.findall(r"^\| (\d+) \| (\w+) \| (.*) \|$", table, re.M) for table in part.strip().split("\n\n")]
    assert [(str(int(code)), code.name, code.meaning) for code in codes] in tables


TROUBLE = [reason for reason in Reason if R.HARVEST <= reason < R.OTHER_RANK]


@pytest.mark.parametrize("reason", TROUBLE, ids=lambda reason: reason.name)
def test_a_failure_is_told_by_its_reason_and_by_what_was_being_done(reason):
    session = session_with()
    session.fail(reason, "planted", doing="in other words")
    assert logged(session) == (S.FAILED, reason) and session.failure == "in other words: planted"
    session = session_with()
    session.fail(reason, "planted")
    assert session.failure == f"{reason.name.lower().replace('_', '-')}: planted"


def test_each_kind_of_trouble_is_of_some_work_and_nothing_else_is_guarded():
    files = [file for folder in ("spec_plugin", "adapters") for file in (ROOT / folder).rglob("*.py")]
    named = {name for file in files for name in re.findall(r"(?:guarded|fail)\(Reason\.([A-Z_]+)", file.read_text())}
    assert named == {reason.name for reason in TROUBLE}


def test_codes_below_ten_draft_and_those_from_twenty_to_twenty_nine_are_trouble():
    assert {state_of(r) for r in Reason if r < 10} == {S.SERVING, S.TRYING}
    assert {state_of(r) for r in Reason if 20 <= r < 30} == {S.FAILED}
    assert S.FAILED not in {state_of(r) for r in Reason if r >= 30}
    assert all(a < b for a, b in pairwise(Speculation)) and all(a < b for a, b in pairwise(Reason))


@pytest.mark.parametrize(
    ("known", "state", "reason"),
    [
        ((None, None, None, None, False), S.UNTRIED, R.NO_DRAFT_YET),
        ((S.SERVING, None, None, None, False), None, None),
        ((S.SERVING, True, None, None, False), None, None),
        ((S.TRYING, True, None, None, False), None, None),
        ((S.RESTING, False, None, None, False), None, None),
        ((S.DROPPED, True, None, None, False), None, None),
        ((S.DROPPED, False, None, None, False), None, None),
        ((S.SERVING, False, None, None, False), S.RESTING, R.DECIDED_ELSEWHERE),
        ((S.RESTING, True, None, None, False), S.SERVING, R.DECIDED_ELSEWHERE),
        ((None, True, None, None, False), S.SERVING, R.DECIDED_ELSEWHERE),
        ((None, False, None, None, False), S.RESTING, R.DECIDED_ELSEWHERE),
        ((99.0, True, None, None, False), S.SERVING, R.DECIDED_ELSEWHERE),
        ((S.SERVING, False, R.FRESH_START, None, False), S.RECOVERING, R.FRESH_START),
        ((S.SERVING, False, R.NOT_WAITED_FOR, None, False), S.RESTING, R.NOT_WAITED_FOR),
        ((S.SERVING, True, R.FRESH_START, R.HARVEST, False), S.FAILED, R.HARVEST),
        ((S.DROPPED, True, None, R.REFRESH, True), S.GIVEN_UP, R.REFRESH),
    ],
)
def test_what_is_known_beyond_the_controllers_choice_is_logged_over_it(known, state, reason):
    expected = {} if state is None else {"spec/state": float(state), "spec/reason": float(reason)}
    chosen, drafts, *rest = known
    assert in_force(chosen, None if drafts is None else drafting(drafts), *rest) == expected


def drafting(drafts: bool) -> EngineSchedule:
    return EngineSchedule(Schedule((int(drafts),)))


def test_how_much_is_drafted_is_logged_as_the_engines_have_confirmed_it():
    assert table_metrics(EngineSchedule()) == {"spec/on": 1.0}, "law 3: until they say so they are not plain"
    table = (0, 3, *[2] * 7, 1)
    shown = {"spec/k_b1": 3.0, "spec/k_b8": 2.0, "spec/k_b9": 1.0}
    assert table_metrics(EngineSchedule(Schedule(table))) == {"spec/on": 1.0} | shown
    assert table_metrics(EngineSchedule(Schedule((0,) * 10))) == dict.fromkeys(("spec/on", *shown), 0.0)


@pytest.mark.parametrize(
    ("of", "confirmed", "drafts"),
    [
        ("pdp", "d", True),
        ("ppp", "p", False),
        ("p?p", "?", True),
        ("d?d", "?", True),
        ("?p", "?", True),
        ("p", "p", False),
    ],
)
def test_law_3_several_engines_are_plain_if_all_of_them_say_so(of, confirmed, drafts):
    each = {"d": drafting(True), "p": drafting(False), "?": EngineSchedule()}
    found = EngineSchedule.of_all([each[engine] for engine in of])
    assert found == each[confirmed] and found.drafting == drafts


def test_a_new_draft_is_untried_until_it_promises_enough_then_serves_and_rests():
    c = controller({8: 2.0})
    assert chosen(c) == (S.UNTRIED, R.NO_DRAFT_YET)
    rolled_out(c, None)
    refreshed(c, 1.2)
    assert chosen(c) == (S.RESTING, R.BELOW_BREAK_EVEN)
    rolled_out(c, None)
    refreshed(c, 3.5)
    assert chosen(c) == (S.SERVING, R.PREDICTED_TO_PAY)
    rolled_out(c, 1.1)
    assert chosen(c) == (S.RESTING, R.BELOW_BREAK_EVEN)
    for _ in range(8):
        rolled_out(c, None)
    assert chosen(c) == (S.TRYING, R.A_TRY)


def test_a_draft_that_was_given_is_tried_first_and_served_if_it_pays():
    c = controller({8: 2.0}, draft="/given")
    assert chosen(c) == (S.TRYING, R.A_TRY)
    rolled_out(c, 2.1)
    assert chosen(c) == (S.SERVING, R.PREDICTED_TO_PAY)


def test_a_draft_that_pairs_have_shown_to_be_slower_rests():
    c = controller({8: 2.0}, draft="/given")
    assert chosen(c) == (S.TRYING, R.A_TRY)
    slow = tuple(StepPair(8, K, 2.0, 0.5) for _ in range(12))
    c.spec_rollout_end(RolloutStats(1, 8, 1000, 1.0, 1000, K * 1000, 2000, pairs=slow))
    assert chosen(c) == (S.RESTING, R.BELOW_BREAK_EVEN)


@pytest.mark.parametrize(
    ("options", "state", "reason"),
    [
        ({"serve": "never"}, S.FORBIDDEN, R.SERVE_NEVER),
        ({"serve": "always"}, S.SERVING, R.ASKED_FOR),
    ],
)
def test_what_the_user_has_decided_is_said_to_be_so(options, state, reason):
    assert chosen(controller({8: 2.0}, **options)) == (state, reason)


def test_costs_that_were_not_measured_are_the_reason_once_there_is_a_draft():
    c = controller(None)
    assert c.cost.problem is not None and chosen(c) == (S.UNTRIED, R.NO_DRAFT_YET)
    refreshed(c, 3.5)
    assert chosen(c) == (S.RESTING, R.COST_UNKNOWN)


def test_drafted_tokens_that_the_sampler_has_no_memory_for_are_the_reason():
    c = controller({8: 2.0}, serve="always")
    target = replace(TARGET, hf_config={"vocab_size": 1 << 40}, max_num_seqs=1, device_type="cuda")
    c.spec_configure(SpecConfig.parse({"k": K, "serve": "always"}), target, c._method)
    assert chosen(c) == (S.RESTING, R.NO_ROOM)


@pytest.mark.parametrize("recoveries", [0, 2])
def test_trouble_names_its_work_and_whether_a_fresh_start_follows(recoveries):
    run = Run(recoveries=recoveries)
    run.step()
    state, reason = logged(run.session)
    assert state in (S.UNTRIED, S.SERVING, S.TRYING) and reason < R.HARVEST
    run.engines.broken = "install"
    run.step()
    assert logged(run.session) == (S.FAILED if recoveries else S.GIVEN_UP, R.REFRESH)
    run.engines.broken = ""
    if recoveries:
        for _ in range(8):
            run.step()
        assert logged(run.session) == (S.RECOVERING, R.FRESH_START)
        run.step()
        assert logged(run.session)[0] in (S.SERVING, S.TRYING)


def test_trouble_of_another_rank_is_said_to_be_there_and_no_more_than_that_is_known():
    session = session_with()
    session.follow("another rank: its own warning says why")
    assert logged(session) == (S.FAILED, R.OTHER_RANK)
    session.follow(None)
    assert logged(session) == (S.UNTRIED, R.NO_DRAFT_YET)


def test_without_the_controller_a_step_still_logs_its_state():
    session = session_with(block=["controller"])
    assert logged(session) == (S.UNTRIED, R.NO_DRAFT_YET)
    session.engines = EngineSchedule()
    assert logged(session) == (S.SERVING, R.DECIDED_ELSEWHERE)


def test_a_plugin_that_chooses_k_before_the_controller_is_seen():
    class Mine:
        @hookimpl(tryfirst=True)
        def spec_schedule(self):
            return Schedule((0, *[1] * TARGET.max_num_seqs))

    session = session_with(Mine())
    session.engines = EngineSchedule(session.schedule(0))
    assert logged(session) == (S.SERVING, R.DECIDED_ELSEWHERE)


def test_a_plugin_that_fails_in_its_metrics_is_no_trouble_of_the_drafts():
    session = session_with(raising("spec_metrics", ValueError("broken")))
    assert logged(session) == (S.UNTRIED, R.NO_DRAFT_YET)


def test_a_dropped_draft_is_logged_with_its_reason():
    c = controller({8: 2.0}, serve="auto")
    refreshed(c, 3.5)
    assert chosen(c)[0] is S.SERVING
    steps = tuple(replace(step, paused=True) for step in timed({8: 2.0})[:1])
    c.spec_rollout_end(RolloutStats(1, 8, 1000, 1.0, 100, 300, 20, steps=steps))
    metrics = c.spec_metrics()
    assert (metrics["spec/state"], metrics["spec/reason"]) == (S.DROPPED, R.BELOW_BREAK_EVEN)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ((0, 0, 0), "no drafts at any batch size"),
        ((0, 3, 3), "k=3 for batch size from 1"),
        ((0, 3, 3, 1, 0, 0), "k=3 for batch size 1-2, k=1 for 3, k=0 from 4"),
    ],
)
def test_a_table_in_words(table, text):
    assert in_words(table) == text
