from __future__ import annotations

import pytest
from builders.traces import Trace, handed, metrics, one_problem
from spec_plugin_conformance import omissions


def checks(trace: Trace) -> list[dict]:
    return [e for e in trace.events if e["hook"] == "spec_check_logprobs"]


def test_a_right_trace_passes():
    trace = Trace().events
    assert (
        omissions.responses_checked(trace) == omissions.engines_tested(trace) == omissions.budgets_opened(trace) == []
    )


# logprobs_come_from_the_engine


@pytest.mark.parametrize(("first", "last"), [(0, -1), (1, None), (1, -1)])
def test_a_mask_that_leaves_tokens_of_each_response_out_is_seen(first, last):
    trace = Trace()
    for event in checks(trace):
        event["rows"]["rollout"] = [row[first:last] for row in event["rows"]["rollout"]]
    one_problem(omissions.responses_checked(trace.events), "8 of 8 sequences that a guard was shown are parts")


@pytest.mark.parametrize("left", [1, -1])
def test_a_trainer_that_cuts_a_response_and_names_it_has_left_nothing_out(left):
    trace = Trace()
    rows = checks(trace)[0]["rows"]["rollout"]
    checks(trace)[0]["rows"]["rollout"] = [rows[0][:left], *rows[1:]]
    one_problem(omissions.responses_checked(trace.events), "a guard has seen 7 of 8 responses")
    trace.add("rows_cut", rows=[rows[0][:left]])
    assert omissions.responses_checked(trace.events) == []


def test_of_a_conversation_the_trainer_may_have_cut_the_last_turn():
    trace = Trace()
    rows = checks(trace)[0]["rows"]["rollout"]
    both = rows[0] + rows[1][:1]
    checks(trace)[0]["rows"]["rollout"] = [both, *rows[2:]]
    one_problem(omissions.responses_checked(trace.events), "a guard has seen 6 of 8 responses")
    trace.add("rows_cut", rows=[both])
    assert omissions.responses_checked(trace.events) == []


def test_responses_that_no_guard_has_seen_are_counted():
    trace = Trace()
    for event in checks(trace):
        event["rows"]["rollout"] = event["rows"]["rollout"][:1]
    one_problem(omissions.responses_checked(trace.events), "a guard has seen 4 of 8 responses")


def test_what_the_trainer_says_to_have_dropped_need_not_be_seen_and_nothing_else():
    trace = Trace()
    for number, event in enumerate(e for e in trace.events if e["hook"] == "engine_request"):
        event["sequences"] = [[7, 7, 7, number, 1]]
    for event in checks(trace):
        event["rows"]["rollout"] = event["rows"]["rollout"][:1]
    second = [[7, 7, 7, number, 1, 5, 5] for number in (1, 3, 5, 7)]
    assert omissions.responses_checked(trace.events, second) == []
    one_problem(omissions.responses_checked(trace.events, second[1:]), "a guard has seen 4 of 5 responses")


def test_ranks_see_them_together():
    trace = Trace()
    for event in checks(trace):
        rows = event["rows"]["rollout"]
        event["rows"]["rollout"] = rows[:1]
        trace.add("spec_check_logprobs", session="b", **{**told_of(event), "rows": {"rollout": rows[1:]}})
    assert omissions.responses_checked(trace.events) == []


def told_of(event: dict) -> dict:
    return {k: v for k, v in event.items() if k not in ("hook", "session", "pid", "event", "time")}


def test_where_the_engines_keep_log_probs_of_some_nobody_expects_all():
    trace = Trace()
    for event in checks(trace):
        event["rows"]["rollout"] = event["rows"]["rollout"][:1]
        trace.add("spec_check_logprobs", session="b", **told_of(event) | {"rows": {"rollout": None}, "rollout": False})
    assert omissions.responses_checked(trace.events) == []


def test_log_probs_of_one_response_are_not_those_that_an_engine_keeps():
    trace = Trace()
    for event in checks(trace):
        answered = [e for e in trace.events if e["hook"] == "engine_request"]
        for i, copy in enumerate(answered * 2):
            trace.add("engine_request", session="e", **told_of(copy) | {"log_probs": [-(i + 1) / 7, -1.0]})
        event["rows"]["rollout"] = event["rows"]["rollout"][:1]
        trace.add("spec_check_logprobs", session="b", **told_of(event) | {"rows": {"rollout": None}, "rollout": False})
    trace.events.sort(key=lambda e: e["hook"] == "spec_rollout_end")  # all were sampled in the last phase
    one_problem(omissions.responses_checked(trace.events), "a guard was shown those of 1")


def test_log_probs_that_enter_the_loss_are_all_shown():
    trace = Trace()
    for event in checks(trace):
        event["rows"]["rollout"], event["rollout_in_loss"] = event["rows"]["rollout"][:1], True
    one_problem(omissions.responses_checked(trace.events), "a guard has seen 4 of 8 responses")


def test_a_check_of_no_row_shows_nothing():
    trace = Trace()
    checks(trace)[1]["rows"]["rollout"] = []
    one_problem(omissions.responses_checked(trace.events), "a guard has seen 6 of 8 responses")


def test_the_turns_of_a_conversation_are_seen_in_one_row():
    trace = Trace()
    for event in checks(trace):
        event["rows"]["rollout"] = [[v for row in event["rows"]["rollout"] for v in row]]
    assert omissions.responses_checked(trace.events) == []
    checks(trace)[0]["rows"]["rollout"][0].pop()
    one_problem(omissions.responses_checked(trace.events), "a guard has seen 6 of 8 responses")


def test_responses_are_compared_as_the_trainer_keeps_them():
    trace = Trace()
    trace.kept_in_half_precision()
    assert omissions.responses_checked(trace.events) == []
    for event in checks(trace):
        event["rows"]["rollout"] = event["rows"]["rollout"][:1]
    one_problem(omissions.responses_checked(trace.events), "4 of 8")


# speculation_is_told_as_it_was


def test_drafted_tokens_that_are_said_to_be_plain_are_seen():
    trace = Trace()
    assert omissions.undrafted_tokens_reported(trace.events) == []
    for event in checks(trace):
        event["plain"] = 12
    one_problem(
        omissions.undrafted_tokens_reported(trace.events),
        "48 tokens are reported as sampled without drafts, the engine was asked for 0 of them",
    )
    for event in checks(trace):
        event["speculating"] = False
    assert omissions.undrafted_tokens_reported(trace.events) == [], "nothing was drafted"


def test_a_control_group_that_the_guard_is_not_told_of_is_seen():
    trace = Trace()
    for n in (1, 2):
        trace.find("engine_request", n)["plain"] = 5
        assert omissions.undrafted_tokens_reported(trace.events) == [], "another response may be of the same text"
    trace.find("engine_request", 3)["plain"] = 5
    one_problem(
        omissions.undrafted_tokens_reported(trace.events),
        "sampled 15 tokens without drafts, and the adapter reports none",
    )
    checks(trace)[0]["plain"] = 3
    assert omissions.undrafted_tokens_reported(trace.events) == [], (
        "a stretch is said to be shorter than it was asked for"
    )
    checks(trace)[0]["plain"] = 16
    one_problem(omissions.undrafted_tokens_reported(trace.events), "16 tokens are reported")


# samples_are_the_targets


def test_an_engine_that_rolls_out_untested_is_seen():
    trace = Trace()
    trace.find("engine_request_begins", 2)["engine"] = 1
    one_problem(omissions.engines_tested(trace.events), "1 of 2 engines rolled out before their self-test")
    trace = Trace()
    trace.find("engine_request_begins", 2)["pid"] = 2
    one_problem(omissions.engines_tested(trace.events), "1 of 2 engines")


# hooks_fire_in_order


def test_a_step_that_harvests_from_the_budget_of_another_is_seen():
    trace = Trace().drop("harvest_opened", 1)
    one_problem(
        omissions.budgets_opened(trace.events), "in the step of policy version 1 hidden states were harvested without"
    )
    for _ in range(3):
        trace.drop("harvest_opened")
    assert omissions.budgets_opened(trace.events) == [], "an adapter may have a harvest of its own"


# all_metrics_reach_the_log


def test_metrics_that_are_logged_a_step_late_are_seen():
    late = {step: handed(max(1, step - 1)) for step in (1, 2, 3, 4)}
    one_problem(omissions.metrics_a_step_late(Trace().events, late, ""), "logged with the step after it")
    assert omissions.metrics_a_step_late(Trace().events, metrics("train/"), "train/") == []


def test_metrics_that_stand_still_are_not_late():
    trace = Trace()
    for event in trace.events:
        if event["hook"] == "handed_metrics":
            event["values"] = handed(1)
    assert omissions.metrics_a_step_late(trace.events, {step: handed(1) for step in (1, 2, 3)}, "") == []
