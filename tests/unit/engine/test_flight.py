"""Which policy version sampled which token of a request, also where a weight sync came in between."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from builders.batches import span_of
from vllm.logprobs import FlatLogprobs, Logprob

from spec_plugin.api.spans import FORGOTTEN, KEPT_LOG_PROBS, Span, fingerprints, weighed
from spec_plugin.engine import flight
from spec_plugin.engine.control_group import ControlStretch
from spec_plugin.engine.flight import UNKNOWN, Clock, Request, RequestTracker

PROMPT, RESPONSE = [5, 6, 7], [10, 11, 12, 13, 14, 15]


def complete(
    tracker: RequestTracker, request: Request, version: int, drafted: bool = True, control=None, log_probs=None
) -> list[Span]:
    request.control = control
    request.completed(RESPONSE, log_probs=log_probs)
    tracker.completed(request, PROMPT, version, drafted)
    return tracker.take_spans()


def part(first: int, until: int, version: int, plain: tuple[int, int] = (0, 0)) -> Span:
    """Tokens of the response."""
    return span_of([*PROMPT, *RESPONSE[:first]], RESPONSE[first:until], version, plain)


def test_a_request_that_no_sync_cuts_is_one_span():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        assert complete(tracker, request, 4) == [part(0, 6, 4)]
    assert (tracker.requests, tracker.tokens, tracker.in_flight) == (1, 6, 0)


def test_a_request_that_goes_on_under_new_weights_is_cut_where_it_stood():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        tracker.pause({request.number: 2}, 4, drafted=False)
        assert tracker.tokens == 2, "that the phase which ends has sampled"
        tracker.begin(5)
        tracker.resume()
        spans = complete(tracker, request, 5)
    assert spans == [part(0, 2, 4, plain=(3, 5)), part(2, 6, 5)]
    assert tracker.tokens == 4


def test_each_part_of_a_request_has_its_own_log_probs():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        tracker.pause({request.number: 2}, 4, drafted=False)
        tracker.begin(5)
        spans = complete(tracker, request, 5, log_probs=[-1.0, -2.0, -4.0, -8.0, -16.0, -32.0])
    sums = [weighed([-1.0, -2.0], 3), weighed([-4.0, -8.0, -16.0, -32.0], 5)]
    assert [span.stated for span in spans] == [(total,) * 3 for total in sums], (
        "powers of two are the same in each dtype"
    )


def test_a_request_that_had_sampled_nothing_is_of_the_new_version_alone():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        tracker.pause({request.number: 0}, 4, drafted=True)
        tracker.begin(5)
        assert complete(tracker, request, 5) == [part(0, 6, 5)]


def test_two_pauses_of_one_sync_cut_once():
    """The self-test has the engine resumed and paused again."""
    tracker = RequestTracker()
    with tracker.request(4) as request:
        for _ in range(2):
            tracker.pause({request.number: 2}, 4, drafted=True)
        tracker.begin(5)
        assert complete(tracker, request, 5) == [part(0, 2, 4), part(2, 6, 5)]


def test_what_was_complete_but_not_yet_here_when_weights_came_is_of_the_old_version():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        tracker.pause({}, 4, drafted=False)
        tracker.begin(5)
        assert complete(tracker, request, 5, drafted=True) == [part(0, 6, 4, plain=(3, 9))]


def test_where_nobody_says_how_far_a_request_had_come_its_tokens_are_unknown():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        tracker.pause(None, 4, drafted=True)
        tracker.begin(5)
        tracker.pause({request.number: 3}, 5, drafted=True)
        tracker.begin(6)
        assert complete(tracker, request, 6) == [part(3, 6, 6)]
        assert request.stretches[0].version == UNKNOWN


def test_a_phase_that_begins_without_a_pause_leaves_what_is_in_flight_unknown():
    tracker = RequestTracker()
    with tracker.request(4) as request:
        tracker.begin(5)
        assert complete(tracker, request, 5) == []


def test_the_control_groups_stretch_is_cut_as_its_request_is():
    tracker = RequestTracker()
    control = ControlStretch(1, 3)
    assert control.span(3, 6) == (4, 9)
    with tracker.request(4) as request:
        tracker.pause({request.number: 3}, 4, drafted=True)
        tracker.begin(5)
        spans = complete(tracker, request, 5, control=control)
    assert spans == [part(0, 3, 4, plain=(4, 6)), part(3, 6, 5, plain=(6, 9))]


def test_the_time_in_which_an_engine_is_paused_is_no_generation_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    tracker = RequestTracker()
    with tracker.request(4) as request:
        now[0] = 2.0
        tracker.pause({request.number: 1}, 4, drafted=True)
        now[0] = 10.0
        assert tracker.seconds == 2.0
        tracker.begin(5)
        tracker.resume()
        now[0] = 11.0
        assert tracker.seconds == 1.0
        request.tokens = 6
    now[0] = 20.0
    assert tracker.seconds == 1.0


def test_a_clock_counts_while_it_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    for running, at in ((True, 1.0), (True, 2.0), (False, 4.0), (False, 9.0)):
        clock.run(running)
        now[0] = at
    assert clock.seconds == 2.0
    clock.reset()
    assert clock.seconds == 0.0


def test_a_response_that_many_syncs_have_cut_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four stretches of 16,000 tokens were once sixty-four copies of the document."""
    seen: list[int] = []
    monkeypatch.setattr(flight, "fingerprints", lambda tokens: seen.append(len(tokens)) or fingerprints(tokens))
    tracker, response = RequestTracker(), list(range(640))
    with tracker.request(0) as request:
        for version in range(63):
            tracker.pause({request.number: 10 * (version + 1)}, version, drafted=True)
            tracker.begin(version + 1)
            tracker.resume()
        request.completed(response, log_probs=[-0.5] * 640)
        tracker.completed(request, PROMPT, 63, True)
    spans = tracker.take_spans()
    assert [s.version for s in spans] == list(range(64)) and seen == [643]
    assert spans[7] == span_of([*PROMPT, *response[:70]], response[70:80], 7, log_probs=[-0.5] * 10)


def test_log_probs_that_the_trainer_did_not_ask_for_are_kept_of_the_last_spans_alone() -> None:
    tracker = RequestTracker()
    for number in range(KEPT_LOG_PROBS + 2):
        with tracker.request(4) as request:
            request.completed([number, number], log_probs=[-0.5, -number], asked=False)
        tracker.completed(request, PROMPT, 4, True)
    kept = [span.log_probs for span in tracker.take_spans()]
    assert kept[:2] == [None, None] and None not in kept[2:]
    assert kept[-1] == np.array([-0.5, -(KEPT_LOG_PROBS + 1.0)]).tobytes()


def test_log_probs_in_flat_lists_are_those_of_the_sampled_tokens() -> None:
    flat = FlatLogprobs()
    for token, said in ((7, -0.25), (9, -0.5)):
        flat.append({token: Logprob(said), 3: Logprob(-0.125)})  # the sampled one comes first
    with RequestTracker().request(0) as one:
        one.answered(SimpleNamespace(token_ids=[7, 9], logprobs=flat), asked=False)
        assert one.log_probs == [-0.25, -0.5] and one.response == [7, 9] and not one.asked
        one.answered(SimpleNamespace(token_ids=[7, 9], logprobs=list(flat)))
        assert one.log_probs == [-0.25, -0.5]
        one.answered(SimpleNamespace(token_ids=[7], logprobs=None))
        assert one.log_probs is None


def test_an_engine_that_has_sampled_more_than_it_keeps_says_so(monkeypatch):
    monkeypatch.setattr(flight, "KEPT", 2)
    tracker = RequestTracker()
    tracker._spans = type(tracker._spans)(maxlen=2)
    for _ in range(3):
        with tracker.request(4) as request:
            request.completed(RESPONSE)
            tracker.completed(request, PROMPT, 4, True)
    assert tracker.take_spans()[-1] == FORGOTTEN
    assert tracker.take_spans() == []
