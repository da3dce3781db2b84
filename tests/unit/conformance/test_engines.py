"""What each engine was asked and told; one thing is broken in a right trace, and one problem is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.traces import Trace, one_problem
from spec_plugin_conformance import engines, omissions
from spec_plugin_conformance.checks import _same_bits
from spec_plugin_conformance.watch import asked_of

CONFIGURED = {"max_tokens": 8}


def requests(trace: Trace) -> list[dict[str, Any]]:
    return [e for e in trace.events if e["hook"] == "engine_request"]


def pair() -> Trace:
    """Two engines; the second one gets the second of each two requests."""
    trace = Trace()
    for event in list(trace.events):
        if event["hook"] in ("engine_schedule", "engine_phase", "engine_state"):
            place = trace.events.index(event)
            trace.events.insert(place + 1, event | {"engine": 1})
    for hook in ("engine_request_begins", "engine_request"):
        for event in [e for e in trace.events if e["hook"] == hook and not e["test"]][1::2]:
            event["engine"] = 1
    return trace


@pytest.mark.parametrize("trace", [Trace(), pair()])
def test_a_right_trace_passes(trace: Trace) -> None:
    assert engines.requests_as_configured(trace.events, CONFIGURED) == []
    assert engines.phase_seconds(trace.events, False) == engines.every_engine_informed(trace.events) == []
    assert engines.weights_arrived(trace.events, Trace.weights(2)) == []
    assert engines.ran_concurrently(Trace().events, False) == []


# requests_are_the_trainers


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_tokens": 4}, "1 of 8 requests ask for max_tokens=4; the trainer's configuration says 8"),
        ({"max_tokens": 8, "ignore_eos": True}, "ignore_eos=True; the trainer's configuration says vLLM's default"),
        ({}, "max_tokens=vLLM's default; the trainer's configuration says 8"),
    ],
)
def test_a_request_that_asks_for_something_else_is_seen(asked: dict[str, Any], said: str) -> None:
    trace = Trace()
    requests(trace)[3]["asked"] = asked
    one_problem(engines.requests_as_configured(trace.events, CONFIGURED), said)


def test_a_rest_of_a_response_may_be_shorter_and_no_longer() -> None:
    trace = Trace()
    requests(trace)[3]["asked"] = {"max_tokens": 3}
    assert engines.requests_as_configured(trace.events, {"max_tokens": (1, 8)}) == []
    one_problem(
        engines.requests_as_configured(trace.events, {"max_tokens": (4, 8)}),
        "max_tokens=3; the trainer's configuration says 4 to 8",
    )


def test_what_a_request_asks_is_all_that_is_not_usual() -> None:
    from vllm import SamplingParams

    assert asked_of(SamplingParams()) == {"max_tokens": 16} or asked_of(SamplingParams()) == {}
    given = SamplingParams(
        temperature=0.7,
        top_k=-1,
        max_tokens=9,
        ignore_eos=True,
        seed=3,
        stop_token_ids=[5],
        logprobs=2,
        detokenize=False,
    )
    found = asked_of(given)
    assert found == {"temperature": 0.7, "max_tokens": 9, "ignore_eos": True, "seed": 3, "stop_token_ids": "[5]"}


# requests_run_at_once


def test_requests_that_wait_for_each_other_are_seen() -> None:
    trace = Trace()
    for request in requests(trace):
        request["began"] = request["time"] - 1
    assert len(engines.ran_concurrently(trace.events, False)) == 4
    assert "at most 1 ran at once" in engines.ran_concurrently(trace.events, False)[0]


def test_where_phases_overlap_two_are_no_evidence() -> None:
    one_problem(engines.ran_concurrently(Trace().events, True), "0 phases with several requests")


# phases_are_timed_as_they_ran


@pytest.mark.parametrize(
    ("seconds", "asynchronous", "problems"), [(9.0, False, 1), (9.0, True, 1), (0.2, False, 1), (0.2, True, 0)]
)
def test_a_phase_that_lasted_as_long_as_no_request_did_is_seen(
    seconds: float, asynchronous: bool, problems: int
) -> None:
    trace = Trace()
    trace.find("spec_rollout_end", 2)["seconds"] = seconds
    found = engines.phase_seconds(trace.events, asynchronous)
    assert len(found) == problems
    assert not found or "requests were in flight for 3.00 s" in found[0]


@pytest.mark.parametrize(("clock", "said"), [("another", "another engine's clock"), ("none", "no engine's clock")])
def test_a_request_on_a_foreign_clock_is_seen(clock: str, said: str) -> None:
    trace = pair()
    trace.find("engine_request_begins", 2, test=False)["clock"] = clock
    one_problem(engines.phase_seconds(trace.events, False), f"1 of 8 requests were timed on {said}")


# every_engine_is_told


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("engine_phase", "1 of 2 engines did not get start_phase"),
        ("engine_state", "1 of 2 engines were never asked for their state"),
    ],
)
def test_an_engine_that_is_left_out_is_seen(hook: str, said: str) -> None:
    trace = pair()
    trace.events = [e for e in trace.events if e["hook"] != hook or e["engine"] == 0]
    found = engines.every_engine_informed(trace.events)
    assert len(found) == 4 and all(said in problem for problem in found)


@pytest.mark.parametrize("engine", [0, 1])
def test_an_engine_without_the_table_of_the_others_is_seen(engine: int) -> None:
    trace = pair()
    trace.events.remove(trace.find("engine_schedule", 3, engine=engine))
    assert engines.every_engine_informed(trace.events) == []  # it has that of the phase before
    trace.events = [e for e in trace.events if e["hook"] != "engine_schedule" or e["engine"] != engine]
    assert all(
        "engines draft by different tables" in problem for problem in engines.every_engine_informed(trace.events)
    )
    assert len(engines.every_engine_informed(trace.events)) == 4


# every_weight_arrives


def test_a_weight_that_stays_behind_or_is_rounded_is_named() -> None:
    trace, policy = Trace(), Trace.weights(2)
    one_problem(
        engines.weights_arrived(trace.events, policy | {"norm": torch.full((3,), 1.0001)}),
        "1 of 2 weights never came to an engine",
    )
    rounded = {name: tensor.bfloat16().float() for name, tensor in policy.items()}
    one_problem(engines.weights_arrived(trace.events, rounded), "as they are in the checkpoint, in their place: matrix")
    assert engines.weights_arrived(trace.events, {n: t.bfloat16() for n, t in policy.items()}) == []


def test_weights_of_several_versions_are_none_of_one() -> None:
    policy = {"a": Trace.weights(1)["matrix"], "b": Trace.weights(3)["matrix"]}
    one_problem(engines.weights_arrived(Trace().events, policy), "1 of 2 weights never came")


def test_parts_of_rows_are_none() -> None:
    trace = Trace()
    assert not engines.in_parts(trace.events)
    trace.find("engine_configured")["tensor_parallel"] = 2
    assert engines.in_parts(trace.events)


def test_nothing_is_shown_where_nobody_looked() -> None:
    one_problem(engines.weights_arrived(Trace().events[:5], Trace.weights(0)), "0 looks at an engine's weights")


def test_bits_are_bits() -> None:
    a = torch.ones(3)
    assert _same_bits(a, a.clone())
    assert (
        not _same_bits(a, a + 1e-7)
        and not _same_bits(torch.zeros(1), -torch.zeros(1))
        and not _same_bits(a, a.double())
    )


# wrong_options_stop_the_run


def test_a_run_that_goes_on_with_a_wrong_option_is_seen() -> None:
    refused = f"SpecConfigError: {engines.WRONG_OPTION}=7.5"
    assert engines.options_refused({}, refused, []) == []
    one_problem(engines.options_refused({}, None, []), "went on to its end")
    one_problem(engines.options_refused({}, "out of memory", []), "without naming the option train_share")
    one_problem(engines.options_refused({1: {}}, refused, []), "sampled or trained before it stopped")
    one_problem(engines.options_refused({}, refused, Trace().events), "sampled or trained before it stopped")


# hooks_fire_in_order


def test_more_than_one_budget_a_step_is_seen() -> None:
    trace = Trace()
    place = trace.events.index(trace.find("harvest_opened", 1))
    trace.events.insert(place, trace.events[place] | {"event": trace.events[place]["event"] - 0.5})
    one_problem(omissions.budgets_opened(trace.events), "policy version 1 RolloutHarvest.open was called 2 times")
