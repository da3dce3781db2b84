"""Versions in an asynchronous run: of spans, of tokens, and what the log-probs say of them."""

from __future__ import annotations

from typing import Any

import pytest
from builders.traces import Trace
from spec_plugin_conformance import judge, versions
from spec_plugin_conformance.plants import LOGPROB


class Lagging(Trace):
    """Rollouts go on while the actor trains: every sequence began under the policy before, and ended under this one."""

    def __init__(self) -> None:
        super().__init__()
        self.events[0]["dtype"] = "float32"
        for event in self.events:
            if event["hook"] == "spec_check_logprobs":
                now = event["policy_version"]
                lags = {"0": 2e-6, "1": 1e-3} if now else {"0": 2e-6}
                event |= {"lag_allowed": True, "versions": [sorted({max(0, now - 1), now})] * 2, "differences": lags}

    def overlapping(self) -> Lagging:
        """The phase ends at the next weight sync."""
        ends = [e for e in self.events if e["hook"] == "spec_rollout_end"]
        for end in ends:
            later = [e for e in self.events if e["event"] > end["event"] and e["hook"] == "spec_metrics"]
            end["event"] = later[0]["event"] + 0.5
        self.events = [e for e in self.events if e["hook"] != "audit" or e["moment"] != "rolled out"]
        return self

    def check(self, version: int) -> dict[str, Any]:
        return self.find("spec_check_logprobs", policy_version=version)


def problems(trace: Trace) -> list[str]:
    return versions.policy_versions(trace.events, asynchronous=True) + versions.lags(trace.events)


def test_a_right_run_passes():
    assert problems(Lagging()) == []
    assert judge.order(Lagging().overlapping().events, asynchronous=True) == []
    assert judge.order(Lagging().overlapping().events) != []


def test_a_synchronous_trainer_is_not_taken_for_an_asynchronous_one():
    trace = Lagging()
    for event in trace.events:
        if event["hook"] == "spec_check_logprobs":
            event["differences"] = {"0": 2e-6}
    (said,) = problems(trace)
    assert "not asynchronous" in said


def test_from_where_the_kit_has_planted_a_wrong_log_prob_differences_show_nothing_and_before_they_do():
    trace, tour = Lagging(), [{"event": "planted", "what": LOGPROB, "policy_version": 2}]
    trace.check(2)["differences"]["0"] = 0.03
    assert versions.lags(trace.events, tour) == []
    trace.check(1)["differences"]["0"] = 0.03
    (said,) = versions.lags(trace.events, tour)
    assert "more than rounding" in said


@pytest.mark.parametrize("tokens", [[2, 4], [3, 2], [-1, 3], [2, -1, 3]])
def test_versions_that_cannot_be_or_are_unknown_are_seen(tokens):
    trace = Lagging()
    event = trace.check(3)
    event["versions"] = [event["versions"][0], tokens]
    (found,) = problems(trace)
    assert f"sequence 1 checked at policy version 3 is reported as sampled by {tokens}" in found


def test_sequences_that_do_not_say_are_seen():
    trace = Lagging()
    trace.check(2)["versions"] = [[-1], [-1]]
    (found,) = problems(trace)
    assert "reported with the versions" in found


def test_older_text_that_is_said_to_be_of_the_recomputing_policy_is_seen_by_its_log_probs():
    trace = Lagging()
    trace.check(2)["differences"] = {"0": 9e-4, "1": 1e-3}
    (found,) = problems(trace)
    assert "0.0009 nats, more than rounding" in found
    trace.events[0]["dtype"] = "bfloat16"
    assert problems(trace) == []  # rounding may be as much there


def test_a_phase_without_training_is_seen():
    trace = Lagging().overlapping()
    trace.drop("spec_train_draft", 1)
    assert any("spec_train_draft is missing" in p for p in judge.order(trace.events, asynchronous=True))


def test_metrics_may_be_asked_for_more_than_once_between_two_syncs_but_not_never():
    trace = Lagging().overlapping()
    last = trace.find("spec_metrics", 1)
    trace.events.append({**last, "event": last["event"] + 0.1})
    assert judge.order(trace.events, asynchronous=True) == []
    trace.events = [e for e in trace.events if e["hook"] != "spec_metrics"]
    assert any("fired 0 times" in p for p in judge.order(trace.events, asynchronous=True))


def test_a_run_that_resumes_goes_on_counting():
    first, second = Trace(), Trace(first_version=2, steps=2)
    assert versions.resumed(first.events, second.events) == []
    (found,) = versions.resumed(Trace(first_version=1).events, Trace().events)
    assert found.startswith("the resumed run begins with policy version 0, its first checkpoint was of 1")
    assert versions.resumed([], second.events) == versions.resumed(first.events, []) == [], "others see that"
