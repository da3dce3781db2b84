from __future__ import annotations

from types import SimpleNamespace

import pytest

from spec_plugin.engine.schedule.steps import StepLog, kind_of
from spec_plugin.events import StepTiming


def output(batch=2, k=3, **changes):
    requests = [f"r{i}" for i in range(batch)]
    fields = {
        "num_scheduled_tokens": dict.fromkeys(requests, k + 1),
        "scheduled_spec_decode_tokens": {r: [7] * k for r in requests} if k else {},
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(num_computed_tokens=[100 * (i + 1) for i in range(batch)]),
    }
    return SimpleNamespace(**(fields | changes))


PLAIN, K3 = (0,) * 9, (0,) + (3,) * 8


def test_a_decoding_step_has_one_kind():
    assert kind_of(output(4, 3), K3) == (4, 3, False)
    assert kind_of(output(4, 0), PLAIN) == (4, 0, True)
    assert kind_of(output(4, 0), (0, 3, 3, 0, 0)) == (4, 0, False)


@pytest.mark.parametrize(
    "mixed",
    [
        output(scheduled_new_reqs=["new"]),
        output(num_scheduled_tokens={}),
        output(num_scheduled_tokens={"r0": 4, "r1": 17}),  # a chunk of a prompt
        output(scheduled_spec_decode_tokens={"r0": [7, 7, 7]}),  # r1 is plain
        output(k=1),  # drafted under another table
        output(batch=9),  # beyond the table
    ],
)
def test_a_mixed_step_has_none(mixed):
    assert kind_of(mixed, K3) is None


def test_a_step_lasts_until_the_next_one_begins():
    log = StepLog()
    for now in (0.0, 1.0, 3.0, 4.0):
        log.begin(output(), K3, now)
    assert log.take() == [StepTiming(2, 3, False, 1.0, 3, 150.0)]
    log.begin(output(), K3, 5.0)  # the step from 4.0 belongs to the new list
    assert log.take() == [StepTiming(2, 3, False, 1.0, 1, 150.0)]


def test_time_without_requests_and_mixed_steps_is_not_counted():
    log = StepLog()
    log.begin(output(), K3, 0.0)
    log.interrupt()
    log.begin(output(scheduled_new_reqs=["new"]), K3, 100.0)
    log.begin(output(k=0), PLAIN, 200.0)
    log.begin(output(k=0), PLAIN, 201.0)
    assert log.take() == [StepTiming(2, 0, True, 1.0, 1, 150.0)]


def test_a_draft_that_no_worker_could_pause_is_not_called_paused():
    log = StepLog()
    for now in (0.0, 1.0):
        log.begin(output(k=0), PLAIN, now, paused=False)
    assert log.take() == [StepTiming(2, 0, False, 1.0, 1, 150.0)]


def test_a_look_up_proposes_up_to_k_tokens_for_each_request_often_none():
    some = output(
        num_scheduled_tokens={"r0": 4, "r1": 1, "r2": 2},
        scheduled_spec_decode_tokens={"r0": [7] * 3, "r2": [7]},
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[100] * 3),
    )
    assert kind_of(some, K3) is None
    assert kind_of(some, K3, ragged=True) == (3, 3, False)
    chunk = output(num_scheduled_tokens={"r0": 4, "r1": 17})
    assert kind_of(chunk, K3, ragged=True) is None
    assert kind_of(output(2, 4), K3, ragged=True) is None


def test_uneven_steps_are_averaged_without_the_longest():
    log = StepLog(ragged=True)
    now = 0.0
    for seconds in (1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 100.0):
        log.begin(output(), K3, now)
        now += seconds
    log.begin(output(), K3, now)
    (found,) = log.take()
    assert found.seconds == pytest.approx(9 / 7)


def test_steps_in_which_some_request_drafts_less_are_known_by_their_time_alone():
    """As of the control group, one of which is in nearly every large batch."""
    control = output(num_scheduled_tokens={"r0": 4, "r1": 1}, scheduled_spec_decode_tokens={"r0": [7, 7, 7]})
    prompt = output(num_scheduled_tokens={"r0": 4, "r1": 17}, scheduled_spec_decode_tokens={"r0": [7, 7, 7]})
    arrives = output(num_scheduled_tokens={"r0": 4, "r1": 1}, scheduled_new_reqs=["r1"])
    log = StepLog()
    for now, step in (
        (0.0, output()),
        (1.0, control),
        (3.0, prompt),
        (10.0, arrives),
        (20.0, control),
        (21.5, output()),
    ):
        log.begin(step, K3, now)
    log.begin(output(), K3, 22.5)
    assert log.take() == [StepTiming(2, 3, False, 1.0, 2, 150.0, 2.0 + 1.5)]
    log.begin(control, K3, 30.0)
    log.interrupt()
    log.begin(output(), K3, 40.0)
    log.begin(output(k=0), PLAIN, 41.0)
    assert log.take()[0].mixed_seconds == 0.0, "the engine may have waited for requests"


def test_seconds_of_a_batch_in_which_no_step_was_alike_go_to_the_nearest_that_drafts_as_much():
    control = output(4, num_scheduled_tokens={"r0": 4, "r1": 4, "r2": 4, "r3": 1})
    control.scheduled_spec_decode_tokens = {r: [7, 7, 7] for r in ("r0", "r1", "r2")}
    log = StepLog()
    for now, step in ((0.0, output(2)), (1.0, output(7)), (2.0, control), (5.0, output(2))):
        log.begin(step, K3, now)
    log.begin(control, K3, 6.0)
    log.begin(output(2), K3, 6.5)
    assert {s.batch: s.mixed_seconds for s in log.take()} == {2: 3.5, 7: 0.0}
