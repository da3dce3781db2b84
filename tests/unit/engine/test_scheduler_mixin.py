"""What the mix-in of our schedulers asks of its parts, and when, around a vLLM that is played here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin.api.events import StepTiming
from spec_plugin.engine.vllm.schedule.cutoff import DraftCutoff
from spec_plugin.engine.vllm.schedule.mixin import SpecSchedulerMixin
from spec_plugin.engine.vllm.schedule.plain import PLAIN

K = 3


class Vllms:
    """vLLM's half: calls back for each drafted request of a step, as its scheduler does."""

    use_eagle, block_size = True, 16

    def __init__(self, *, variable_length: bool = False, hybrid: bool = False, caching: bool = False) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={"spec_plugin": {"variable_length": variable_length}},
            model_config=SimpleNamespace(is_hybrid=hybrid),
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
        )
        self.requests: dict[str, Any] = {}
        self.dynamic_sd_lookup: list[int] | None = [0] + [K] * 8
        self.unfinished = True
        self.ends: dict[int, int] = {}  # request of a step -> tokens after which its response ends
        self.next: Any = None

    def schedule(self, throttle: bool = False) -> Any:
        return self.next

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        self._hand_out(scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        self._hand_out(draft_token_ids.req_ids)

    def _hand_out(self, names: Any) -> None:
        for name in names:
            self.requests[name].spec_token_ids = [7] * K

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        undrafted = len(scheduler_output.num_scheduled_tokens) - len(model_runner_output)
        for index, accepted in enumerate([*model_runner_output, *[None] * undrafted]):
            if accepted is not None:
                self.make_spec_decoding_stats(None, K, num_accepted_tokens=accepted)
            self._update_request_with_output(SimpleNamespace(index=index), [7] * (1 + (accepted or 0)))
        return "outputs"

    def _update_request_with_output(self, request: Any, new_token_ids: list[int]) -> tuple[list[int], bool]:
        end = self.ends.get(request.index)
        del new_token_ids[len(new_token_ids) if end is None else end :]
        return new_token_ids, end is not None

    def make_spec_decoding_stats(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int) -> str:
        return "stats"

    def has_unfinished_requests(self) -> bool:
        return self.unfinished


class Scheduler(SpecSchedulerMixin, Vllms):
    pass


class Noting(DraftCutoff):
    """Writes down what it is asked to count, too."""

    def __init__(self, table: list[int], needed: float) -> None:
        super().__init__(table, [needed] * len(table))
        self.counted: list[tuple[int, int]] = []

    def emitted(self, batch: int, tokens: int) -> None:
        self.counted.append((batch, tokens))
        super().emitted(batch, tokens)


class Executor:
    """Of workers that leave their draft out, or not."""

    def __init__(self, *answers: bool) -> None:
        self.answers, self.asked = list(answers), []

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bool]:
        self.asked.append((method, *args))
        return self.answers


def counted_by(scheduler: Scheduler, needed: float = 1.5) -> Noting:
    assert scheduler.dynamic_sd_lookup is not None
    scheduler.spec_cutoff = noting = Noting(scheduler.dynamic_sd_lookup, needed)
    scheduler.spec_executor = Executor(True, True)
    return noting


def output(drafted: int, undrafted: int = 0) -> Any:
    """vLLM's of a decoding step."""
    drafts = {f"drafted {i}": [7] * K for i in range(drafted)}
    requests = dict.fromkeys(drafts, K + 1) | {f"plain {i}": 1 for i in range(undrafted)}
    return SimpleNamespace(
        num_scheduled_tokens=requests,
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[100] * len(requests)),
    )


def step(scheduler: Scheduler, *accepted: int, undrafted: int = 0) -> Any:
    return scheduler.update_from_output(output(len(accepted), undrafted), list(accepted))


def test_law_7_a_verification_step_made_its_accepted_tokens_and_the_bonus_token():
    scheduler = Scheduler()
    noting = counted_by(scheduler)
    assert step(scheduler, 0, 3) == "outputs"
    assert noting.counted == [(2, 1), (2, 4)]
    assert scheduler.make_spec_decoding_stats(None, 0, 0) == "stats" and len(noting.counted) == 2
    scheduler.spec_steps.take()


def test_law_7_what_is_accepted_beyond_the_end_of_a_response_was_not_made():
    scheduler = Scheduler()
    noting, scheduler.ends = counted_by(scheduler), {0: 1, 1: 3}
    step(scheduler, 3, 3, 3, undrafted=1)
    assert noting.counted == [(4, 1), (4, 3), (4, 4)]
    scheduler.spec_steps.take()
    assert scheduler.spec_steps.past_end == [1, 1, 2]
    step(scheduler, undrafted=2)
    assert len(noting.counted) == 3, "a plain step is nobody's draft, whatever the one before it was"


@pytest.mark.parametrize("answers", [(True, True), (True, False)])
def test_law_7_a_draft_that_just_pays_is_kept_and_one_that_does_not_is_dropped_within_the_step(answers):
    scheduler = Scheduler()
    cutoff, scheduler.spec_executor = counted_by(scheduler), Executor(*answers)
    for _ in range(400):
        step(scheduler, 0, 1, 1)  # 1.67 tokens a step, and 1.5 are needed
    assert any(scheduler.dynamic_sd_lookup) and not scheduler.spec_executor.asked
    while any(scheduler.dynamic_sd_lookup):
        step(scheduler, 0, 0, 0)
    assert not cutoff.due
    assert scheduler.spec_executor.asked == [("spec_pause_draft", True)]
    assert scheduler.spec_paused is all(answers), "else its steps would be timed as plain ones"


def test_a_draft_that_is_kept_for_small_batches_is_not_paused():
    scheduler = Scheduler()
    counted_by(scheduler)
    scheduler.spec_cutoff = DraftCutoff(scheduler.dynamic_sd_lookup, [0.5] * 3 + [3.0] * 6)
    while scheduler.dynamic_sd_lookup[3]:
        step(scheduler, 0, 0, 0)
    assert scheduler.dynamic_sd_lookup == [0, K, K] + [0] * 6
    assert not scheduler.spec_executor.asked and not scheduler.spec_paused


def test_the_batch_is_of_all_requests_of_a_step_drafted_or_not():
    scheduler = Scheduler()
    noting = counted_by(scheduler)
    step(scheduler, 2, undrafted=3)
    assert noting.counted == [(4, 3)]


@pytest.mark.parametrize("variable_length", [True, False])
def test_requests_without_a_draft_count_against_a_look_up_only(variable_length):
    """Where a model drafts for all, those without are plain because they must be."""
    scheduler = Scheduler(variable_length=variable_length)
    noting = counted_by(scheduler)
    step(scheduler, 2, undrafted=2)
    assert noting.counted == [(3, 3)] + [(3, 1), (3, 1)] * variable_length


def test_until_a_table_is_set_nothing_is_dropped():
    scheduler = Scheduler(variable_length=True)
    for _ in range(500):
        assert step(scheduler, 0, undrafted=1) == "outputs"
    assert scheduler.dynamic_sd_lookup == [0] + [K] * 8


def test_a_step_lasts_from_one_schedule_to_the_next_and_an_empty_engine_is_none(monkeypatch):
    from spec_plugin.engine.vllm.schedule import mixin

    clock = iter((0.0, 1.0, 2.5, 100.0, 102.0))
    monkeypatch.setattr(mixin, "time", SimpleNamespace(perf_counter=clock.__next__))
    scheduler = Scheduler()
    scheduler.next = output(2)
    scheduler.schedule(), step(scheduler, 0, 0)
    assert scheduler.schedule(True) is scheduler.next
    scheduler.unfinished = False
    step(scheduler, 0, 0)  # the last one: the engine waits from here on
    scheduler.schedule(), scheduler.schedule()
    last = StepTiming(2, K, False, 1.5, 1, 100.0, alike=False)  # the engine was busy with it
    assert sorted(scheduler.spec_steps.take(), key=lambda s: s.alike) == [last, StepTiming(2, K, False, 1.5, 2, 100.0)]
    assert scheduler.spec_steps.busy_seconds == 4.5


def test_steps_of_a_paused_draft_are_told_from_those_of_one_that_runs():
    scheduler = Scheduler()
    scheduler.dynamic_sd_lookup = [0] * 9
    scheduler.next = output(0, undrafted=2)
    for paused in (False, True, True):
        scheduler.spec_paused = paused
        scheduler.schedule()
    assert [t.paused for t in scheduler.spec_steps.take()] == [False, True]


def waiting(scheduler: Scheduler, *plain: str) -> dict[str, Any]:
    for name in "abc":
        params = SimpleNamespace(extra_args=PLAIN if name in plain else None)
        scheduler.requests[name] = SimpleNamespace(spec_token_ids=[], sampling_params=params, num_output_tokens=5)
    return scheduler.requests


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plain_request_has_no_drafts_wherever_vllm_hands_them_out(asynchronous):
    scheduler = Scheduler()
    requests = waiting(scheduler, "b")
    if asynchronous:
        scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens=dict.fromkeys("abc", 1)))
    else:
        scheduler.update_draft_token_ids(SimpleNamespace(req_ids=list("abc")))
    assert {name: len(request.spec_token_ids) for name, request in requests.items()} == {"a": K, "b": 0, "c": K}


def test_the_table_holds_where_the_engine_drafts_more_than_it_says():
    """The V2 runner under synchronous scheduling hands out as many placeholders as it can draft."""
    scheduler = Scheduler()
    requests = waiting(scheduler)
    scheduler.dynamic_sd_lookup = [K, K, 2, 1, 0]
    for names, k in (("abc", 1), ("ab", 2), ("a", K), ("abc", 1)):
        scheduler.update_draft_token_ids(SimpleNamespace(req_ids=list(names)))
        assert {len(requests[n].spec_token_ids) for n in names} == {k}
    for table in (None, [K, 0]):
        scheduler.dynamic_sd_lookup = table  # none, or none for so many requests
        scheduler.update_draft_token_ids(SimpleNamespace(req_ids=list("abc")))
        assert {len(r.spec_token_ids) for r in requests.values()} == {K}


@pytest.mark.parametrize("hybrid", [True, False])
def test_only_a_target_with_states_has_requests_preempted(hybrid):
    assert (Scheduler(hybrid=hybrid).spec_preemption is not None) == hybrid


def test_in_a_stretch_that_is_timed_plainly_no_draft_is_asked_for_and_the_table_is_what_it_was():
    seen: list[Any] = []

    class Reading(Vllms):
        def schedule(self, throttle: bool = False) -> Any:
            seen.append(self.dynamic_sd_lookup)
            return self.next

    class Whole(SpecSchedulerMixin, Reading):
        pass

    scheduler = Whole()
    table = scheduler.dynamic_sd_lookup
    requests = waiting(scheduler)
    scheduler.next = output(3)
    scheduler.spec_pairs.follow(0.1)
    while not scheduler.spec_pairs.plain:
        scheduler.schedule()
    asked = seen[-1]
    assert asked == [0] * 9 and scheduler.dynamic_sd_lookup is table == [0] + [K] * 8
    scheduler.update_draft_token_ids(SimpleNamespace(req_ids=list("abc")))
    assert not any(request.spec_token_ids for request in requests.values()), "the V2 runner drafts all the same"
    scheduler.next = output(0, undrafted=3)
    while scheduler.spec_pairs.plain:
        scheduler.schedule()
    scheduler.schedule()
    assert seen[-1] is table


@pytest.mark.parametrize(
    ("words", "caching", "dropped"),
    [
        ({}, True, 16),
        ({}, False, 0),
        ({"use_eagle": False}, True, 0),
        ({"use_eagle_block_drop": True}, True, 16),
        ({"use_eagle_block_drop": False}, True, 0),  # since vLLM 0.31 it can be left out
    ],
)
def test_what_vllm_drops_of_a_hit_in_the_prefix_cache_is_counted_only_where_it_does(words, caching, dropped):
    scheduler = type("Told", (Scheduler,), words)(caching=caching)
    arrival = SimpleNamespace(req_id="a", num_computed_tokens=256)
    scheduler.next = output(1)
    scheduler.next.num_scheduled_tokens["a"], scheduler.next.scheduled_new_reqs = 32, [arrival]
    scheduler.schedule()
    scheduler.spec_steps.take()
    assert scheduler.spec_steps.recomputed_tokens == dropped and scheduler.spec_steps.prompt_tokens == 32
