from __future__ import annotations

from types import SimpleNamespace

import pytest

from spec_plugin.api.events import StepTiming
from spec_plugin.engine.vllm.schedule.steps import StepLog, kind_of


def output(batch=2, k=3, **changes):
    requests = [f"r{i}" for i in range(batch)]
    fields = {
        "num_scheduled_tokens": dict.fromkeys(requests, k + 1),
        "scheduled_spec_decode_tokens": {r: [7] * k for r in requests} if k else {},
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(num_computed_tokens=[100 * (i + 1) for i in range(batch)]),
    }
    return SimpleNamespace(**(fields | changes))


def new(request, cached=0):
    return SimpleNamespace(req_id=request, num_computed_tokens=cached)


PLAIN, K3 = (0,) * 9, (0,) + (3,) * 8


def test_a_decoding_step_has_one_kind():
    assert kind_of(output(4, 3), K3) == (4, 3, False)
    assert kind_of(output(4, 0), PLAIN) == (4, 0, True)
    assert kind_of(output(4, 0), (0, 3, 3, 0, 0)) == (4, 0, False)


@pytest.mark.parametrize(
    "mixed",
    [
        output(scheduled_new_reqs=[new("r0")]),
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


def test_time_without_requests_is_not_counted_and_steps_that_are_not_alike_are_counted_beside_the_others():
    log = StepLog()
    log.begin(output(), K3, 0.0)
    log.accept(3, 3), log.accept(0, 0), log.accept(4, 1)
    log.interrupt(0.5)
    log.interrupt(7.0)
    log.begin(output(num_scheduled_tokens={}), K3, 50.0)
    log.begin(output(scheduled_new_reqs=[new("r0")]), K3, 100.0)
    log.begin(output(k=0), PLAIN, 200.0)
    log.begin(output(k=0), PLAIN, 201.0)
    others = {"drafted": 2, "alike": False}
    assert log.take() == [
        StepTiming(2, 3, False, 0.5, 1, 150.0, **others),
        StepTiming(2, 3, False, 100.0, 1, 150.0, **others, prompts=True),
        StepTiming(2, 0, True, 1.0, 1, 150.0),
    ]
    assert log.busy_seconds == 101.5 and log.past_end == [0, 1, 1, 1]
    assert log.take() == log.past_end == [] and log.busy_seconds == 0.0, "each is told once"


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
    assert kind_of(some, K3, variable_length=True) == (3, 3, False)
    chunk = output(num_scheduled_tokens={"r0": 4, "r1": 17})
    assert kind_of(chunk, K3, variable_length=True) is None
    assert kind_of(output(2, 4), K3, variable_length=True) is None


def test_uneven_steps_are_averaged_without_the_longest():
    log = StepLog(variable_length=True)
    now = 0.0
    for seconds in (1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 100.0):
        log.begin(output(), K3, now)
        now += seconds
    log.begin(output(), K3, now)
    (found,) = log.take()
    assert found.seconds == pytest.approx(9 / 7)


def test_steps_in_which_some_request_has_no_draft_are_known_by_how_many_have_one():
    """As of the control group, one of which is in nearly every large batch."""
    control = output(num_scheduled_tokens={"r0": 4, "r1": 1}, scheduled_spec_decode_tokens={"r0": [7, 7, 7]})
    both = output(num_scheduled_tokens={"r0": 1, "r1": 1}, scheduled_spec_decode_tokens={})
    prompt = output(num_scheduled_tokens={"r0": 4, "r1": 17}, scheduled_spec_decode_tokens={"r0": [7, 7, 7]})
    arrives = output(num_scheduled_tokens={"r0": 4, "r1": 1}, scheduled_new_reqs=[new("r1")])
    log = StepLog()
    for now, step in (
        (0.0, output()),
        (1.0, control),
        (3.0, prompt),
        (10.0, arrives),
        (20.0, both),
        (21.5, output()),
        (22.5, output(k=0)),
    ):
        log.begin(step, K3, now)
    log.begin(output(k=3), PLAIN, 24.0)
    log.begin(output(9, 3), K3, 25.0)
    log.end(27.0)
    alike, *mixed = log.take()
    assert alike == StepTiming(2, 3, False, 1.0, 2, 150.0) and not any(m.alike for m in mixed)
    assert {(m.batch, m.k, m.prompts): (m.total, m.steps, m.drafted) for m in mixed} == {
        (2, 3, False): (2.0 + 1.5 + 1.5 + 1.0, 4, 1 + 0 + 0 + 2),  # in the last the table had just changed
        (2, 3, True): (17.0, 2, 1 + 2),
        (9, 3, False): (2.0, 1, 9),  # the table does not know of it
    }
    assert log.busy_seconds == 27.0


def test_tokens_of_prompts_are_counted_and_of_each_prompt_that_the_cache_knew_the_block_that_vllm_dropped():
    log = StepLog(dropped=16)
    widths = {"r0": [7, 7, 7]}
    reads = {"r0": 4, "r1": 40, "r2": 24, "r3": 100}  # r0 decodes, r1 goes on with its prompt
    arrivals = [new("r2", 256), new("r3")]
    log.begin(
        output(num_scheduled_tokens=reads, scheduled_spec_decode_tokens=widths, scheduled_new_reqs=arrivals), K3, 0.0
    )
    log.begin(output(), K3, 1.0)
    log.take()
    assert (log.prompt_tokens, log.recomputed_tokens) == (39 + 24 + 100, 16)
    log.take()
    assert (log.prompt_tokens, log.recomputed_tokens) == (0, 0), "each is told once"
