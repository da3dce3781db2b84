"""Requests in flight say how far they have come, and stand aside for others, with vLLM's own queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

from spec_plugin.engine.vllm.schedule.utilities import NUMBER, spec_in_flight, spec_stand_aside


class Asked:
    """A request as the scheduler knows it."""

    def __init__(self, number: int | None, tokens: int = 0) -> None:
        extra = None if number is None else {NUMBER: number}
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.num_output_tokens, self.finished = tokens, False
        self.priority, self.arrival_time, self.request_id = 0, number or 0, str(number)

    def is_finished(self) -> bool:
        return self.finished

    def __lt__(self, other: Asked) -> bool:
        return (self.priority, self.arrival_time) < (other.priority, other.arrival_time)


def core(policy: SchedulingPolicy, *waiting: Asked) -> Any:
    queues = {name: create_request_queue(policy) for name in ("waiting", "skipped_waiting")}
    for request in waiting:
        queues["waiting"].add_request(request)
    requests = {r.request_id: r for r in waiting}
    scheduler = SimpleNamespace(policy=policy, running=[], requests=requests, spec_aside=None, **queues)
    return SimpleNamespace(scheduler=scheduler)


def test_what_is_in_flight_says_how_far_it_has_come():
    mine, done, foreign = Asked(3, 17), Asked(4, 20), Asked(None, 5)
    done.finished = True
    assert spec_in_flight(core(SchedulingPolicy.FCFS, mine, done, foreign)) == [[3, 17]]


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_requests_come_back_in_their_order_before_those_that_came_meanwhile(policy):
    first, second, skipped, late = (Asked(i) for i in range(1, 5))
    c = core(policy, first, second)
    c.scheduler.skipped_waiting.add_request(skipped)
    assert spec_stand_aside(c, True) == 3
    assert not c.scheduler.waiting and not c.scheduler.skipped_waiting
    c.scheduler.waiting.add_request(late)
    spec_stand_aside(c, False)
    assert list(c.scheduler.waiting) == [first, second, late]
    assert list(c.scheduler.skipped_waiting) == [skipped]
    assert spec_stand_aside(c, False) == 0, "and only once"


def test_what_was_aborted_meanwhile_does_not_come_back():
    first, second = Asked(1), Asked(2)
    c = core(SchedulingPolicy.FCFS, first, second)
    spec_stand_aside(c, True)
    first.finished = True
    assert spec_stand_aside(c, False) == 1
    assert list(c.scheduler.waiting) == [second]


def test_nobody_stands_aside_while_requests_run():
    c = core(SchedulingPolicy.FCFS)
    c.scheduler.running = [Asked(1)]
    with pytest.raises(RuntimeError, match="pause the engine"):
        spec_stand_aside(c, True)


def test_nobody_who_stands_aside_is_forgotten():
    c = core(SchedulingPolicy.FCFS, Asked(1))
    spec_stand_aside(c, True)
    with pytest.raises(RuntimeError, match="already"):
        spec_stand_aside(c, True)
    assert spec_stand_aside(c, False) == 1 and len(c.scheduler.waiting) == 1
    assert spec_stand_aside(c, True) == 1, "and later once more"
