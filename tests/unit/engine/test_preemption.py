"""Requests of a target with states are preempted where vLLM would cut their drafts; others are left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin.engine.vllm.schedule.mixin import SpecSchedulerMixin

K, CONTEXT = 3, 32


class Request(SimpleNamespace):
    @property
    def num_tokens_with_spec(self) -> int:
        return int(self.num_tokens) + len(self.spec_token_ids)


class Vllms:
    """vLLM's half, with its own arithmetic of drafts (``Scheduler.schedule``), as far as running requests go."""

    def __init__(self, hybrid: bool = True, tokens: int = 1000) -> None:
        speculative = SimpleNamespace(max_num_new_slots_for_drafting=0)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(is_hybrid=hybrid),
            speculative_config=speculative,
            additional_config={},
            cache_config=SimpleNamespace(enable_prefix_caching=False),
        )
        self.use_eagle = True
        self.dynamic_sd_lookup = None
        self.scheduler_config = SimpleNamespace(max_num_batched_tokens=tokens, long_prefill_token_threshold=0)
        self.max_num_scheduled_tokens, self.max_model_len, self.num_spec_tokens = tokens, CONTEXT, K
        self.num_sampled_tokens_per_step = 1
        self._pause_state = SimpleNamespace(name="UNPAUSED")
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        request.num_computed_tokens, request.spec_token_ids = 0, []
        self.waiting.insert(0, request)

    def schedule(self) -> Any:
        left = 0 if self._pause_state.name == "PAUSED_ALL" else self.max_num_scheduled_tokens
        scheduled, drafts = {}, {}
        for r in self.running:
            room = self.max_model_len - r.num_computed_tokens - 1
            n = min(r.num_tokens_with_spec - r.num_computed_tokens, left, room)
            if n <= 0:
                continue
            left -= n
            scheduled[r.request_id] = n
            kept = n + r.num_computed_tokens - r.num_tokens
            if r.spec_token_ids and kept > 0:
                drafts[r.request_id] = r.spec_token_ids[:kept]
            r.spec_token_ids = []
        self.running += self.waiting  # a prompt again: all of it fits
        scheduled |= {r.request_id: r.num_tokens for r in self.waiting}
        self.waiting = []
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens=drafts,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[]),
        )


class Scheduler(SpecSchedulerMixin, Vllms):
    def add(self, name: str, tokens: int) -> Any:
        request = Request(request_id=name, num_tokens=tokens, num_computed_tokens=tokens - 1, spec_token_ids=[])
        self.requests[name] = request
        self.running.append(request)
        return request

    def step(self, accepted: int = 0) -> Any:
        """One step, and the drafts for the next; of those verified so many are accepted."""
        output = self.schedule()
        for r in self.running:
            if r.request_id in output.num_scheduled_tokens:
                r.num_tokens += 1 + min(accepted, len(output.scheduled_spec_decode_tokens.get(r.request_id, ())))
                r.num_computed_tokens = r.num_tokens - 1
                r.spec_token_ids = [7] * K
        return output

    def widths(self) -> dict[str, int]:
        output = self.step()
        return {r: len(output.scheduled_spec_decode_tokens.get(r, ())) for r in output.num_scheduled_tokens}


def test_drafts_are_verified_whole_or_not_at_all_up_to_the_end_of_the_context():
    scheduler = Scheduler()
    request = scheduler.add("r", CONTEXT - 8)
    steps = []
    while request.num_tokens < CONTEXT:
        output = scheduler.step()
        steps.append((output.num_scheduled_tokens["r"], len(output.scheduled_spec_decode_tokens.get("r", ()))))
    assert steps == [(1, 0), (4, 3), (4, 3), (4, 3), (4, 3), (29, 0), (1, 0), (1, 0)], (
        "all of it again, once, then plain"
    )


def test_a_request_that_never_had_drafts_is_not_computed_again():
    scheduler = Scheduler()
    scheduler.add("r", CONTEXT - 3)
    assert [scheduler.step().num_scheduled_tokens for _ in range(3)] == [{"r": 1}] * 3


def test_a_full_step_takes_no_drafts_from_a_request_that_had_some():
    scheduler = Scheduler(tokens=9)
    for name in "abc":
        scheduler.add(name, 8)
    assert scheduler.widths() == {"a": 0, "b": 0, "c": 0}
    assert scheduler.widths() == {"a": 3, "b": 3, "c": 0}, "the last one has had none and goes on without"
    assert scheduler.widths() == {"a": 3, "b": 3, "c": 0}
    scheduler.running.reverse()  # as after a preemption: now a request with drafts finds the step full
    output = scheduler.step()
    assert {r: len(d) for r, d in output.scheduled_spec_decode_tokens.items()} == {"c": 3, "b": 3}
    assert output.num_scheduled_tokens["a"] > 1, "a prompt again"


def test_where_nothing_is_left_of_a_step_the_drafts_wait():
    scheduler = Scheduler(tokens=4)
    scheduler.add("a", 8), scheduler.add("b", 8)
    scheduler.step()
    assert scheduler.widths() == {"a": 3}
    assert scheduler.requests["b"].spec_token_ids == [7] * K and not scheduler.waiting


def test_a_request_of_which_nothing_is_scheduled_is_not_computed_again():
    """It takes up no state in this step; in a later one it has drafts again, or room for all of it."""
    scheduler = Scheduler()
    scheduler.add("a", 8), scheduler.add("b", 8)
    scheduler.step(), scheduler.step()
    scheduler.max_num_scheduled_tokens, before = 4, scheduler.requests["b"].num_computed_tokens
    scheduler.requests["b"].spec_token_ids = []
    assert scheduler.step().num_scheduled_tokens == {"a": 4}
    assert not scheduler.waiting and scheduler.requests["b"].num_computed_tokens == before
    scheduler.max_num_scheduled_tokens = 1000
    assert scheduler.step().num_scheduled_tokens == {"a": 4, "b": before + 1}, "now it would take up a wrong state"


def test_requests_that_are_gone_are_forgotten():
    scheduler = Scheduler()
    scheduler.add("a", 8), scheduler.add("b", 8)
    scheduler.step(), scheduler.step()
    assert scheduler.spec_preemption._drafted == {"a", "b"}
    scheduler.running.remove(scheduler.requests.pop("a"))
    scheduler.step()
    assert scheduler.spec_preemption._drafted == {"b"}


@pytest.mark.parametrize("drafts", [[], [7]])
def test_a_request_whose_drafts_are_taken_away_is_computed_anew(drafts):
    """Of a plain stretch, a smaller table, a grammar that cuts them."""
    scheduler = Scheduler()
    request = scheduler.add("r", 8)
    scheduler.step(), scheduler.step(accepted=2)
    request.spec_token_ids = list(drafts)
    assert scheduler.step().num_scheduled_tokens == {"r": 12}


def test_a_paused_engine_sets_nothing_back():
    scheduler = Scheduler()
    request = scheduler.add("r", CONTEXT - 5)
    scheduler.step(), scheduler.step()
    assert request.num_tokens == CONTEXT - 3
    scheduler._pause_state = SimpleNamespace(name="PAUSED_ALL")
    scheduler.schedule()
    assert scheduler.running == [request] and request.num_computed_tokens == CONTEXT - 4


def test_targets_without_states_are_left_to_vllm():
    scheduler = Scheduler(hybrid=False)
    request = scheduler.add("r", CONTEXT - 5)
    widths = []
    while request.num_tokens < CONTEXT:
        widths.append(scheduler.widths()["r"])
    assert widths == [0, 3, 2, 1, 0]
