"""The guard in a scheduler: what of vLLM's calls it counts, for which batch size, and when it drops the draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin.engine.schedule.guard import Guard, GuardedDrafts


class Trainers:
    """vLLM's half: calls back for each drafted request of a step, as its scheduler does."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        for accepted in model_runner_output:
            self.make_spec_decoding_stats(None, 3, accepted)
        return "outputs"

    def make_spec_decoding_stats(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int) -> str:
        return "stats"


class Scheduler(GuardedDrafts, Trainers):
    step_log: Any = None


class Noting(Guard):
    """A guard that also writes down what it is told."""

    def __init__(self, table: list[int], needed: float) -> None:
        super().__init__(table, [needed] * len(table), lambda: None)
        self.told: list[tuple[int, int]] = []

    def emitted(self, batch: int, tokens: int) -> None:
        self.told.append((batch, tokens))
        super().emitted(batch, tokens)


def step(scheduler: Scheduler, *accepted: int, undrafted: int = 0) -> Any:
    requests = {f"drafted {i}": 4 for i in range(len(accepted))} | {f"plain {i}": 1 for i in range(undrafted)}
    drafts = {f"drafted {i}": [7, 8, 9] for i in range(len(accepted))}
    output = SimpleNamespace(num_scheduled_tokens=requests, scheduled_spec_decode_tokens=drafts)
    return scheduler.update_from_output(output, list(accepted))


@pytest.fixture
def scheduler() -> Scheduler:
    out = Scheduler()
    out.guard = Noting([0] + [3] * 8, 1.5)
    return out


def test_law_7_a_verification_step_made_its_accepted_tokens_and_the_bonus_token(scheduler):
    assert step(scheduler, 0, 3) == "outputs"
    assert scheduler.guard.told == [(2, 1), (2, 4)]


def test_law_7_a_draft_that_just_pays_is_kept_and_one_that_does_not_is_dropped_within_the_step(scheduler):
    for _ in range(400):
        step(scheduler, 0, 1, 1)  # 1.67 tokens a step, and 1.5 are needed
    assert any(scheduler.guard._table)
    while any(scheduler.guard._table):
        step(scheduler, 0, 0, 0)
    assert not scheduler.guard.losing


def test_the_batch_is_of_all_requests_of_a_step_drafted_or_not(scheduler):
    step(scheduler, 2, undrafted=3)
    assert scheduler.guard.told == [(4, 3)]


@pytest.mark.parametrize("ragged", [True, False])
def test_requests_without_a_draft_count_against_a_look_up_only(scheduler, ragged):
    """Where a model drafts for all, those without are plain because they must be."""
    scheduler.step_log = SimpleNamespace(ragged=ragged)
    step(scheduler, 2, undrafted=2)
    assert scheduler.guard.told == [(3, 3)] + [(3, 1), (3, 1)] * ragged


def test_without_a_guard_vllm_is_left_alone():
    assert step(Scheduler(), 1) == "outputs"
