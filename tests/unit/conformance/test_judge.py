from __future__ import annotations

import pytest
from builders.traces import Trace, metrics, one_problem, tour
from spec_plugin_conformance import judge, versions
from spec_plugin_conformance.faults import WRONG
from spec_plugin_conformance.plants import PLANTED


@pytest.mark.parametrize(
    "check",
    [
        judge.order,
        versions.policy_versions,
        judge.installed_draft,
        judge.target_untouched,
        judge.target_first,
        judge.samples,
        judge.logprobs,
    ],
)
def test_a_right_trace_passes_and_an_empty_one_does_not(check):
    assert check(Trace().events) == []
    assert check([]) != []


def test_a_trace_that_a_kill_cut_off_anywhere_is_in_order():
    events = Trace().events
    begun = events.index(Trace.find(Trace(), "spec_rollout_start"))
    for end in range(begun + 1, len(events)):
        assert judge.order(events[:end]) == []


def test_the_busiest_rank_is_judged():
    rank = [dict(e, session="b") for e in Trace(steps=2).events]
    assert {e["session"] for e in judge.actor_events(Trace().events + rank)} == {"a"}


# activated_by_the_documented_flag


def test_activated():
    assert judge.activated(Trace().events, metrics("actor/"), "actor/") == []


def test_an_engine_without_a_draft_is_seen():
    one_problem(judge.activated(Trace().drop("spec_method").events, metrics(), ""), "without a draft")


def test_an_actor_without_a_session_is_seen():
    only = Trace().events[:2]
    one_problem(judge.activated(only, metrics(), ""), "no session runs")


def test_rollouts_without_drafts_are_seen():
    trace = Trace()
    for version in range(4):
        trace.find("spec_rollout_end", policy_version=version)["drafts"] = 0
    one_problem(judge.activated(trace.events, metrics(), ""), "nothing was drafted")


def test_metrics_that_never_reach_the_log_are_seen():
    one_problem(judge.activated(Trace().events, {1: {"loss": 1.0}}, "actor/"), "logged no actor/spec/failed")


def test_failed_speculation_is_seen():
    logged = metrics()
    logged[2]["spec/failed"] = 1.0
    trace = Trace()
    trace.find("spec_metrics", 1)["failure"] = "harvest: no memory"
    one_problem(judge.activated(trace.events, logged, ""), "failed in steps [2]: harvest: no memory")


# off_is_off


def test_off():
    assert judge.off([], {1: {"loss": 1.0}}, []) == []


def test_anything_that_is_on_when_off_is_seen():
    one_problem(judge.off(Trace().events[:3], {}, []), "3 hook calls")
    one_problem(judge.off([], {1: {"actor/spec/on": 0.0}}, []), "actor/spec/on")
    one_problem(judge.off([], {}, ["my_adapter"]), "imports my_adapter")


# hooks_fire_in_order


@pytest.mark.parametrize(
    "pair", [("spec_check_logprobs", "spec_train_draft"), ("spec_target_forward", "spec_rollout_end")]
)
def test_hooks_that_change_places_are_seen(pair):
    assert judge.order(Trace().swap(*pair, index=1).events) != []


@pytest.mark.parametrize(
    "hook",
    [
        "spec_rollout_end",
        "spec_check_logprobs",
        "spec_target_forward",
        "spec_train_draft",
        "spec_draft_weights",
        "spec_schedule",
        "spec_metrics",
    ],
)
def test_a_hook_that_is_missing_in_one_step_is_seen(hook):
    problems = judge.order(Trace().drop(hook, 1).events)
    assert any(hook in p or "expected" in p for p in problems), problems


def test_a_refresh_before_the_weights_is_seen():
    one_refresh_early = Trace().swap("spec_weight_sync", "spec_refreshed", index=1)
    assert any("spec_refreshed came after" in p for p in judge.order(one_refresh_early.events))


def test_metrics_before_the_drafts_training_are_seen():
    problems = judge.order(Trace().swap("spec_train_draft", "spec_metrics", index=1).events)
    one_problem(problems, "it misses this step's draft training")


# policy_versions_agree


def test_a_version_that_stands_still_is_seen():
    trace = Trace()
    for event in trace.events:
        if event.get("policy_version") == 2 and event["hook"] != "audit":
            event["policy_version"] = 1
    assert "expected steps of one" in versions.policy_versions(trace.events)[0]


def test_an_engine_with_another_version_is_seen():
    trace = Trace()
    trace.find("audit", moment="rollout", policy_version=2)["policy_version"] = 1
    one_problem(versions.policy_versions(trace.events), "the engine (rollout) has policy version 1")


def test_a_sequence_of_another_version_is_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 2)["versions"] = [[2], [2, 1]]
    one_problem(
        versions.policy_versions(trace.events),
        "sequence 1 checked at policy version 2 is reported as sampled by [2, 1]",
    )


def test_sequences_that_do_not_say_are_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 2)["versions"] = [[-1], [-1]]
    one_problem(versions.policy_versions(trace.events), "no sequence checked at policy version 2")


def test_where_the_trainer_has_cut_a_turn_its_version_may_be_unknown_and_nothing_else():
    trace = Trace()
    event = trace.find("spec_check_logprobs", 2)
    event["versions"] = [[2, -1], [2]]
    one_problem(versions.policy_versions(trace.events), "sequence 0 checked at policy version 2")
    trace.add("rows_cut", rows=event["rows"]["rollout"][:1])
    assert versions.policy_versions(trace.events) == []
    event["versions"] = [[1, -1], [2]]
    one_problem(versions.policy_versions(trace.events), "is reported as sampled by [1, -1]")


# the engine's weights


@pytest.mark.parametrize("moment", ["refreshed", "rollout"])
def test_another_draft_in_the_engine_is_seen(moment):
    trace = Trace()
    trace.find("audit", 2, moment=moment)["draft_digest"] = "d1"
    one_problem(judge.installed_draft(trace.events), f"{moment}: the engine holds draft 2 (d1…), published was 2 (d2…)")


def test_a_refused_refresh_is_seen():
    trace = Trace()
    trace.find("spec_refreshed", 1).update(installed=False, reason="torn")
    one_problem(judge.installed_draft(trace.events), "refused draft 1: torn")


def test_a_refresh_that_writes_into_the_target_is_seen():
    trace = Trace()
    trace.find("audit", 2, moment="refreshed")["target_digest"] = "changed"
    one_problem(judge.target_untouched(trace.events), "changed the target's weights")


def test_weights_that_did_not_arrive_are_seen():
    trace = Trace()
    for event in trace.events:
        if event.get("target_digest") == "t2":
            event["target_digest"] = "t1"
    one_problem(judge.target_first(trace.events), "weight sync 2 changed no weight of the engine's target")


def test_weights_that_arrive_after_the_draft_are_seen():
    trace = Trace()
    trace.find("audit", 2, moment="rollout")["target_digest"] = "later"
    one_problem(judge.target_first(trace.events), "other target weights")


@pytest.mark.parametrize("moment", ["synced", "refreshed", "rollout"])
def test_requests_that_run_before_the_phase_has_begun_are_seen(moment):
    trace = Trace()
    trace.find("audit", 2, moment=moment)["admitted"] = 3
    one_problem(
        judge.target_first(trace.events),
        f"3 requests were in flight while policy version {2 - (moment != 'rollout')} was",
    )


# samples and log-probs


def test_a_missing_late_or_failed_self_test_is_seen():
    one_problem(judge.samples(Trace().drop("spec_engine_ready").events), "never reported")
    one_problem(judge.samples(Trace().swap("spec_engine_ready", "spec_rollout_start").events), "before the self-test")
    failed = Trace()
    failed.find("spec_engine_ready")["checks"][0]["passed"] = False
    one_problem(judge.samples(failed.events), "greedy: 8 of 8")


def test_a_guard_that_misses_a_planted_error_is_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 1)["caught"]["another model"] = False
    one_problem(judge.logprobs(trace.events), "misses 'another model'")


def test_steps_without_evidence_are_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 1)["rollout"] = False
    one_problem(judge.logprobs(trace.events), "no log-probs of the rollout")
    trace = Trace()
    trace.find("spec_check_logprobs", 1)["response_lengths"] = [0, 0]
    one_problem(judge.logprobs(trace.events), "tokens is empty")
    one_problem(judge.logprobs(Trace().drop("spec_check_logprobs", 1).events), "versions [1] were never checked")


# violations and faults


def test_a_run_that_stops_with_the_reason():
    assert judge.stopped(tour(), f"LogprobProvenanceError: {PLANTED}", []) == []


def test_a_run_that_goes_on_after_a_violation_is_seen():
    one_problem(judge.stopped(tour(), None, []), "went on to its end")
    one_problem(judge.stopped(tour(), "killed", []), "without naming")
    one_problem(judge.stopped(tour()[:-1], None, []), "ended before")
    one_problem(judge.stopped(tour()[:-1], "the engine is dead", []), "it stopped before, the engine is dead")
    later = Trace(first_version=21).events
    one_problem(judge.stopped(tour(), PLANTED, later), "rolled out after the violation")


def test_a_verdict_that_comes_after_the_update_is_seen() -> None:
    *before, violation = tour()
    update = {"hook": "policy_update", "pid": 7, "session": "a"}
    told = [*before, violation | {"pid": 7, "time": 5.0}]
    one_problem(judge.stopped(told, PLANTED, [update | {"time": 6.0}]), "updated after the guard had raised")
    assert judge.stopped(told, PLANTED, [update | {"time": 4.0}, update | {"time": 6.0, "pid": 8}]) == []


def test_a_whole_tour():
    assert judge.faults(tour()) == []


def test_drafts_after_a_fault_are_seen():
    events = tour()
    events[4]["drafts"] = 3
    one_problem(judge.faults(events), "spec_rollout_start: 3 verification steps")


def test_a_run_that_stands_still_after_a_fault_is_seen():
    events = tour()
    events[4]["tokens"] = 0
    one_problem(judge.faults(events), "no token")
    events = tour()
    events[5]["policy_version"] = events[4]["policy_version"]
    one_problem(judge.faults(events), "did not move on")
    one_problem(judge.faults(tour()[: -3 - 2 * len(WRONG)]), "spec_metrics: no rollout came after the fault")


def test_speculation_that_never_comes_back_and_hooks_that_never_fire_are_seen():
    one_problem(judge.faults(tour()[: -2 - 2 * len(WRONG)]), "spec_metrics: nothing was drafted after")
    events = [e for e in tour() if e.get("hook") != "spec_refreshed"]
    one_problem(judge.faults(events), "spec_refreshed was never reached")


def test_a_failure_with_another_cause_is_seen():
    events = tour()
    events[4]["why"] = "refresh: out of memory"
    one_problem(judge.faults(events), "another reason: refresh: out of memory")


@pytest.mark.parametrize("what", [{"drafts": 0}, {"why": "x: spec_metrics broken"}])
def test_a_harmless_failure_that_turns_drafts_off_is_seen(what):
    events = tour()
    phase = next(e for e in events if e["event"] == "plain" and e["hook"] == "spec_metrics")
    phase |= what
    one_problem(judge.faults(events), "spec_metrics: its failure, which is to cost a warning, has turned drafts off")


# the draft


def test_learning():
    assert judge.learns(Trace().events, metrics("a/"), "a/") == []


def test_a_draft_that_does_not_learn_is_seen():
    logged = metrics()
    logged[3]["spec/draft_loss"] = 9.0
    one_problem(judge.learns(Trace().events, logged, ""), "did not fall: 6.0000 -> 9.0000")
    trace = Trace()
    trace.find("spec_refreshed", 2)["draft_version"] = 1
    one_problem(judge.learns(trace.events, metrics(), ""), "expected growth")
    logged = metrics()
    logged[3]["spec/refresh_refused"] = 2.0
    one_problem(judge.learns(Trace().events, logged, ""), "refused 2 refreshes")


def test_resuming():
    assert judge.resumed(Trace().events, Trace(first_version=2, draft=2, steps=2).events) == []


def test_a_draft_that_was_saved_and_not_yet_published_when_the_run_was_killed_is_resumed_too():
    killed, unknown = Trace(), Trace(first_version=2, draft=8, steps=2)
    version, digest = next(e["published"] for e in unknown.events if e.get("published"))
    killed.find("spec_save", -1)["saved"] = [version, digest]
    assert judge.resumed(killed.events, unknown.events) == []
    killed.find("spec_save", -1)["saved"] = [version, "other"]
    one_problem(judge.resumed(killed.events, unknown.events), "other weights after resuming")


def test_a_draft_that_is_not_resumed_is_seen():
    other = Trace(first_version=2, draft=2, steps=2)
    other.find("spec_draft_weights")["published"] = [2, "other"]
    one_problem(judge.resumed(Trace().events, other.events), "other weights after resuming")
    new = Trace(first_version=2, draft=2, steps=2)
    new.find("spec_draft_weights")["published"] = [0, "d0"]
    one_problem(judge.resumed(Trace().events, new.events), "as untrained as")
    unknown = Trace(first_version=2, draft=8, steps=2)
    one_problem(judge.resumed(Trace().events, unknown.events), "publishes draft 8 first")
    assert any("spec_load" in p for p in judge.resumed(Trace().events, Trace().events))


# metrics and masks


def test_metric_names_and_bounds():
    assert judge.metric_values(metrics("actor/"), "actor/") == []
    one_problem(judge.metric_values({1: {"spec/on": 1.0}}, "actor/"), "does not begin with actor/spec/")
    one_problem(judge.metric_values({1: {"spec/speed": 1.0}}, ""), "not in the schema")
    one_problem(judge.metric_values({1: {"spec/acceptance_length": 0.5}}, ""), "allowed 1 to 17")
    one_problem(judge.metric_values({1: {"spec/acceptance_length": float("nan")}}, ""), "= nan")
    one_problem(judge.metric_values({1: {"loss": 0.5}}, ""), "no spec/ metric")


def masks(*marked: str) -> list[dict]:
    documents = [list(range(len(text))) for text in marked]
    return [{"policy_version": 0, "masks": [[c == "r" for c in text] for text in marked], "documents": documents}]


def test_loss_masks():
    assert judge.response_lengths(masks("pprrrrr", "prrrrrrr"), Trace().events) == []
    one_problem(judge.response_lengths(masks("prrrrrr"), Trace().events), "6 tokens marked")
    one_problem(judge.response_lengths(masks("prrrrrp"), Trace().events), "not the end")
    one_problem(judge.response_lengths(masks("rrrrr"), Trace().events), "not the end")


def test_the_turns_of_a_conversation_are_marked_where_an_engine_has_answered():
    trace = Trace()
    for first, until in ((2, 4), (7, 10)):
        trace.add("engine_request", session="e", test=False, prompt=first, sequences=[list(range(until))])
    assert judge.response_lengths(masks("pprrtttrrr"), trace.events) == []
    for wrong in ("pprrttrrrt", "pprrrttrrt", "ppttrrrrrt"):
        one_problem(judge.response_lengths(masks(wrong), trace.events), "nor what an engine has answered")


def remembered(hook: str, **what):
    return {"hook": hook, "session": "a", "event": 0, **what}


def test_a_memory_that_does_not_come_back_is_seen():
    first = [remembered("spec_rollout_start"), remembered("memory_keep", rollouts=4), remembered("spec_save")]
    second = [remembered("memory_recall", rollouts=4), remembered("spec_rollout_start")]
    assert judge.recalled(first, second) == []
    assert judge.recalled(first[:2], second) == ["spec_save was never fired before the kill"]
    assert judge.recalled(first[:1], second) == [
        "the method's memory was given no rollout before the kill (memory_keep)"
    ]
    assert judge.recalled(first, second[1:]) == ["the resumed run never recalled the saved rollouts"]
    empty = [remembered("memory_recall", rollouts=0), remembered("spec_rollout_start")]
    assert judge.recalled(first, empty) == ["the resumed run recalled no rollout"]
