"""As many passes of a draft as were asked for: what the patches make of the real functions' surroundings, without an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin.engine.vllm.repairs import draft_passes, patches
from spec_plugin.engine.vllm.repairs.draft_passes import PASS_PATCHES


class Speculator:
    """Counts passes, as vLLM's loop does."""

    num_speculative_steps, dp_size = 8, 1

    def __init__(self) -> None:
        self.passes = 0

    def _multi_step_decode(self) -> None:
        for _ in range(1, self.num_speculative_steps):
            self.passes += 1


class Runner:
    def __init__(self, speculator: Speculator | None) -> None:
        self.speculator = speculator

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> Any:
        if self.speculator is not None:
            draft_passes._up_to_k(Speculator._multi_step_decode)(self.speculator)
        return intermediate_tensors


def passes(speculator: Speculator, asked: int, *args: Any, **kwargs: Any) -> int:
    before = speculator.passes
    step = draft_passes._noting_k(Runner.execute_model)
    step(Runner(speculator), SimpleNamespace(num_spec_tokens_to_schedule=asked), *args, **kwargs)
    assert speculator.num_speculative_steps == 8, "what buffers and kernels are sized by"
    return speculator.passes - before


def test_a_step_runs_the_passes_that_it_asks_for_behind_the_one_that_reads() -> None:
    one = Speculator()
    assert [passes(one, k) for k in (8, 3, 1, 0, 8)] == [7, 2, 0, 0, 7]


def test_a_warm_up_asks_for_none_and_runs_all() -> None:
    """vLLM warms up by scheduler outputs of its own, whose field is 0: kernels are compiled there and not in a rollout."""
    one = Speculator()
    assert [passes(one, 0), passes(one, 3), passes(one, 0)] == [7, 2, 0]


def test_a_dummy_run_and_a_rank_among_others_run_all() -> None:
    one = Speculator()
    assert passes(one, 3) == 2
    assert passes(one, 3, None, True) == 7 and passes(one, 3, dummy_run=True) == 7
    assert passes(one, 3) == 2
    several = Speculator()
    several.dp_size = 2
    assert passes(several, 3) == 7, "a rank without requests is asked for none, and would leave the others waiting"


@pytest.mark.parametrize(("ranks", "moves", "fused"), [(1, True, False), (2, True, True), (1, False, True)])
def test_passes_are_taken_apart_where_they_follow_k_alone(ranks, moves, fused) -> None:
    """Of several ranks all are run, and of a draft whose positions stand still vLLM needs them in one."""

    def configure(self: Any) -> None:
        self.use_fused_multi_step_decode = True

    one = SimpleNamespace(dp_size=ranks, advance_draft_positions=moves)
    draft_passes._one_by_one(configure)(one)
    assert one.use_fused_multi_step_decode is fused


def test_a_runner_without_a_draft_is_left_alone() -> None:
    step = draft_passes._noting_k(Runner.execute_model)
    assert step(Runner(None), SimpleNamespace(), "passed on") == "passed on"


def test_the_real_functions_are_there_and_are_what_the_patches_rely_on() -> None:
    pytest.importorskip("vllm.v1.worker.gpu.spec_decode.autoregressive.speculator")
    try:
        states = {patch.name: patches.apply(patch).state for patch in PASS_PATCHES}
        again = {patch.name: patches.apply(patch).state for patch in PASS_PATCHES}
        _, _, execute = patches.resolve(PASS_PATCHES[0])
        assert "scheduler_output" in inspect.signature(execute).parameters
    finally:
        for patch in PASS_PATCHES:
            patches.revert(patch)
    assert set(states.values()) == {"in force"} == set(again.values()), "0.29; from 0.32 on they are not needed"
