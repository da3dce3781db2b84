from __future__ import annotations

import pytest
from builders.traces import Trace, handed, metrics, one_problem, tour
from spec_plugin_conformance import judge, reported
from spec_plugin_conformance.plants import LOGPROB, NAN, PLANTED, VERSION


def right(trace: list) -> dict[str, list[str]]:
    """What each check finds in this trace."""
    return {
        "engine": reported.engine_facts(trace),
        "trainer": reported.trainer_facts(trace, asynchronous=False),
        "log-probs": reported.logprobs_from_engine(trace),
        "first": reported.checked_before_update(trace),
        "speculation": reported.drafted_batches_reported(trace, asynchronous=False),
        "weights": reported.weights_arrived(trace),
        "states": reported.states_of_the_policy(trace),
        "tokens": reported.tokens_counted(trace),
        "metrics": reported.metrics_logged(trace, metrics(), ""),
    }


def test_a_right_trace_passes():
    assert {name: problems for name, problems in right(Trace().events).items() if problems} == {}


def test_an_empty_trace_proves_nothing():
    assert [name for name, problems in right([]).items() if not problems] == ["trainer"]


# told_facts_are_the_engines


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "bfloat16"), ("max_num_seqs", 16), ("max_model_len", 128), ("tensor_parallel", 2)]
)
def test_an_engine_of_another_configuration_than_was_told_is_seen(name, value):
    trace = Trace()
    trace.find("spec_configure")["engine"][name] = value
    one_problem(reported.engine_facts(trace.events), f"TargetInfo.{name} is {value}, the engine was built with")


def test_what_is_left_open_is_not_compared():
    trace = Trace()
    trace.find("spec_configure")["engine"]["max_model_len"] = None
    assert reported.engine_facts(trace.events) == []


def test_an_option_that_the_allow_list_was_not_shown_is_seen():
    trace = Trace()
    trace.find("engine_configured")["shown"]["logprobs_mode"] = "raw_logprobs"
    one_problem(reported.engine_facts(trace.events), "was shown the engine option logprobs_mode=raw_logprobs")


def test_a_request_of_another_sampling_than_was_told_is_seen():
    trace = Trace()
    trace.find("engine_request", 3)["sampling"] = {"temperature": 0.7}
    one_problem(reported.engine_facts(trace.events), "temperature=0.7")
    trace.find("engine_request", 3)["test"] = True
    assert reported.engine_facts(trace.events) == []


def test_an_actor_that_computes_in_another_dtype_than_was_told_is_seen():
    trace = Trace()
    trace.find("spec_configure")["actor_dtype"] = "bfloat16"
    one_problem(reported.trainer_facts(trace.events, False), "actor_dtype is bfloat16")
    for event in trace.events:
        if event["hook"] == "spec_check_logprobs":
            event["differences"] = {"0": 5e-3}  # autocast: wide states, narrow products
    assert reported.trainer_facts(trace.events, False) == []
    trace = Trace()
    trace.find("spec_target_forward")["dtype"] = "bfloat16"
    one_problem(reported.trainer_facts(trace.events, False), "actor_dtype is float32, the hidden states are")


def test_a_lag_where_there_can_be_none_is_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 1)["lag_allowed"] = True
    one_problem(reported.trainer_facts(trace.events, False), "older than the policy")
    assert reported.trainer_facts(trace.events, True) == []


# logprobs_come_from_the_engine


def test_log_probs_that_no_engine_reported_are_seen():
    trace = Trace()
    event = trace.find("spec_check_logprobs", 1)
    event["rows"]["rollout"][0] = [v - 1e-6 for v in event["rows"]["rollout"][0]]
    one_problem(reported.logprobs_from_engine(trace.events), "policy version 1: 5 of 12 rollout log-probs were never")


def test_log_probs_that_the_trainer_keeps_in_half_precision_are_the_engines_all_the_same():
    trace = Trace()
    trace.kept_in_half_precision()
    assert reported.logprobs_from_engine(trace.events) == []


# logprobs_are_checked_before_they_are_used


def test_a_check_after_the_update_is_seen():
    trace = Trace().swap("spec_check_logprobs", "policy_update", index=1)
    one_problem(
        reported.checked_before_update(trace.events),
        "policy version 1 entered an update and were only checked afterwards",
    )


def test_a_step_without_a_check_is_seen():
    one_problem(
        reported.checked_before_update(Trace().drop("spec_check_logprobs", 2).events),
        "policy version 2 entered an update and were never",
    )


def test_updates_that_nobody_sees_prove_nothing():
    trace = [e for e in Trace().events if e["hook"] != "policy_update"]
    one_problem(reported.checked_before_update(trace), "0 updates of the policy were recorded")


# speculation_is_told_as_it_was


def test_a_drafted_batch_that_is_said_to_be_plain_is_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 1)["speculating"] = False
    one_problem(reported.drafted_batches_reported(trace.events, False), "policy version 1 is reported as plain")
    one_problem(reported.drafted_batches_reported(trace.events, True), "policy version 1 is reported as plain")
    trace.find("spec_rollout_end", 3)["drafts"] = 0
    assert reported.drafted_batches_reported(trace.events, True) == []  # some of it may be that phase's


def test_a_plain_batch_that_is_said_to_be_drafted_is_seen():
    plain = [{"event": "plain", "drafts": 0, "policy_version": 2}]
    one_problem(reported.undrafted_batches_reported(Trace().events, plain), "policy version 2 is reported as drafted")
    trace = Trace()
    trace.find("spec_check_logprobs", policy_version=2)["speculating"] = False
    assert reported.undrafted_batches_reported(trace.events, plain) == []


# planted_errors_reach_the_guard


def test_a_nan_that_was_made_a_number_is_seen_though_the_guard_refuses_the_number():
    cleaned = [e | {"why": "not the target's"} if e.get("what") == NAN and "why" in e else e for e in tour()]
    one_problem(reported.planted_errors_refused(cleaned, True), "reached the guard as a number")


def test_a_planted_error_that_nobody_refuses_is_seen():
    assert reported.planted_errors_refused(tour(), False) == []
    missed = [e | {"event": "missed"} if e.get("what") == VERSION else e for e in tour()]
    one_problem(reported.planted_errors_refused(missed, False), "wrong policy version was planted in each")
    assert reported.planted_errors_refused(missed, True) == []
    never = [e for e in tour() if e.get("what") != LOGPROB]
    one_problem(reported.planted_errors_refused(never, False), "ended before a wrong log-prob")


# failed_self_test_stops_the_run


def test_a_run_that_goes_on_after_its_self_test_failed_is_seen():
    start = [e for e in Trace().events if e["hook"] == "spec_configure"]
    assert reported.self_test_stopped(start, f"LosslessError: samples: {PLANTED}") == []
    one_problem(reported.self_test_stopped(start, None), "went on to its end")
    one_problem(reported.self_test_stopped(start, "CUDA out of memory"), "without naming LosslessError")
    one_problem(reported.self_test_stopped([], f"LosslessError {PLANTED}"), "0 sessions")
    one_problem(reported.self_test_stopped(Trace().events, f"LosslessError {PLANTED}"), "8 responses were sampled")


# weights_arrive_as_they_are


@pytest.mark.parametrize(("key", "name"), [("embed_digest", "embedding"), ("head_digest", "head")])
def test_a_stale_embedding_or_head_is_seen(key, name):
    trace = Trace()
    trace.find("spec_weight_sync", 2)[key] = "of version 0"
    one_problem(
        reported.weights_arrived(trace.events),
        f"policy version 2: the {name} that the weight sync announced is not the",
    )


def test_an_announced_head_that_the_update_changes_is_seen():
    trace = Trace()
    trace.find("spec_train_draft", 1)["changed"] = ["head"]
    one_problem(
        reported.weights_arrived(trace.events),
        "step 1: the head that the weight sync announced changed with the update",
    )


def test_weights_that_were_rounded_on_their_way_are_seen():
    trace = Trace()
    trace.find("spec_check_logprobs", 1)["differences"] = {"0": 4e-4}
    one_problem(reported.weights_arrived(trace.events), "does not have the weights that the actor has")
    trace.find("engine_configured")["dtype"] = "bfloat16"
    assert reported.weights_arrived(trace.events) == []


def test_without_a_draft_a_sync_may_announce_nothing_but_nothing_wrong():
    trace = Trace()
    trace.find("spec_weight_sync", 2)["embed_digest"] = "of version 0"
    one_problem(
        reported.weights_arrived(trace.events, draft=False), "the embedding that the weight sync announced is not the"
    )
    for event in trace.events:
        if event["hook"] == "spec_weight_sync":
            event |= {"embed_digest": "", "head_digest": ""}
    assert reported.weights_arrived(trace.events, draft=False) == []
    one_problem(reported.weights_arrived(trace.events), "0 embeddings or heads with their engine's were recorded")


def test_ranks_that_hold_a_part_of_the_head_each_are_not_compared():
    trace = Trace()
    trace.find("spec_configure")["engine"]["tensor_parallel"] = 2
    for event in trace.events:
        if event["hook"] == "audit":
            event |= {"embed_digest": "", "head_digest": ""}
    assert reported.weights_arrived(trace.events) == []


def test_an_engine_that_holds_another_draft_than_the_others_is_seen():
    trace = Trace()
    for moment in ("refreshed", "rollout"):  # the actor's own audit says nothing of it
        trace.find("engine_state", 2, moment=moment)["draft_digest"] = "d1"
    assert len(judge.installed_draft(trace.events)) == 2


# hidden_states_equal_a_plain_forward


def test_hidden_states_of_another_policy_are_seen():
    trace = Trace()
    event = trace.find("spec_target_forward", 1)
    event["log_probs"] = [[v - 1e-2 for v in row] for row in event["log_probs"]]
    one_problem(
        reported.states_of_the_policy(trace.events),
        "policy version 1: hidden states of 2 of 2 documents are not the policy's",
    )


@pytest.mark.parametrize("off", [0.0, 1e-2])
def test_a_part_of_a_document_is_compared_where_it_lies_in_the_response(off):
    trace = Trace()
    event, checked = trace.find("spec_target_forward", 1), trace.find("spec_check_logprobs", 1)
    recomputed = checked["rows"]["recomputed"]
    recomputed[:] = [[-0.1 * (3 * i % 7) - row for i in range(20)] for row in range(len(recomputed))]
    event["log_probs"] = [[v - off for v in row[4:12]] for row in recomputed]
    assert reported.states_of_the_policy(trace.events), "as documents that end with the response they are others"
    event["offsets"] = [6] * len(recomputed)
    assert bool(reported.states_of_the_policy(trace.events)) == (off > 0)


def test_a_document_that_was_cut_is_compared_by_its_end():
    trace = Trace()
    event = trace.find("spec_target_forward", 1)
    event["log_probs"] = [row[-3:] for row in event["log_probs"]]
    assert reported.states_of_the_policy(trace.events) == []


# token_counts_are_the_engines


def test_counts_that_are_not_the_engines_are_seen():
    trace = Trace()
    trace.find("spec_rollout_end", 1)["tokens"] += 6
    one_problem(
        reported.tokens_counted(trace.events), "policy version 1: 18 tokens were counted, the engine sampled 12"
    )


def test_requests_that_a_kill_found_in_flight_may_have_been_counted():
    trace = Trace()
    assert reported.tokens_counted_asynchronous(trace.events) == []
    trace.find("spec_rollout_end", 3)["tokens"] += 6
    one_problem(
        reported.tokens_counted_asynchronous(trace.events), "54 tokens were counted, the engine sampled at most 48"
    )
    trace.add("engine_request_begins", session="e", test=False)
    assert reported.tokens_counted_asynchronous(trace.events) == []
    trace.find("spec_rollout_end", 2)["tokens"] += 2
    one_problem(reported.tokens_counted_asynchronous(trace.events), "at most 55")


# all_metrics_reach_the_log


def test_a_metric_that_never_reaches_the_log_is_seen():
    logged = {step: {n: v for n, v in found.items() if n != "a/spec/on"} for step, found in metrics("a/").items()}
    one_problem(reported.metrics_logged(Trace().events, logged, "a/"), "1 of 5 metrics never reach the log: spec/on")


def test_a_metric_that_is_logged_with_another_value_is_seen():
    logged = metrics()
    logged[2]["spec/acceptance_length"] = 3.5
    one_problem(
        reported.metrics_logged(Trace().events, logged, ""),
        "acceptance_length is logged as 3.5, it was between 2.5 and 2.5",
    )


def test_what_was_handed_out_before_a_kill_need_not_have_been_logged():
    trace = Trace()
    trace.add("handed_metrics", values=handed(9) | {"spec/new": 1.0})
    assert (
        reported.metrics_logged(trace.events, {s: v | {"spec/draft_loss": 2.0} for s, v in metrics().items()}, "") == []
    )


# random_streams_are_untouched


def test_a_random_stream_that_was_drawn_from_is_seen():
    assert reported.random_streams({"torch": "a"}, {"torch": "a"}) == []
    one_problem(reported.random_streams({"torch": "a"}, {"torch": "b"}), "the random stream torch is elsewhere")
    one_problem(reported.random_streams({}, {}), "hold other random streams")
