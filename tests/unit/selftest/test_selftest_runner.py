"""The self-test's order of stages and its deadline, on an engine that is played here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from spec_plugin.api.events import Check, SelfTestPart, SelfTestReport
from spec_plugin.engine.selftest import test as selftest
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan

PLAN: dict[str, Any] = {
    "prompts": [[1, 2]],
    "sampling": {"temperature": 0.0, "top_p": 0.9},
    "k": 3,
    "vocab_size": 8,
    "alpha": 1e-6,
    "seconds": 0.2,
    "limit": 0.2,
    "max_num_seqs": 2,
}


class Engine:
    """It has a table, and answers the control channel."""

    def __init__(self, hybrid: bool = False, gone: str = "") -> None:
        model = SimpleNamespace(logprobs_mode="raw_logprobs", max_logprobs=20, dtype=torch.float32, is_hybrid=hybrid)
        self.vllm_config, self.engine_core = SimpleNamespace(model_config=model, use_v2_model_runner=True), self
        self.table, self.gone = [0, 1, 2], gone
        self.called: list[str] = []

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        if name == self.gone:
            raise RuntimeError("gone")
        self.called.append(name)
        if name == "spec_set_schedule":
            self.table = list(args[0])
        return [] if name == "spec_take_steps" else {"table": list(self.table)}

    async def reset_prefix_cache(self) -> None:
        pass


def run(monkeypatch: pytest.MonkeyPatch, engine: Engine, **changes: Any) -> tuple[SelfTestReport, list[Any]]:
    """A test whose stages are played, too: what was asked of them, in order."""
    asked: list[Any] = []

    def stage(name: str) -> Any:
        async def played(*_: Any) -> Any:
            asked.append((name, list(engine.table)))
            yield Check(f"{name}: first", True, "")
            if name == "samples":
                raise ValueError("half-way")
            if name == "switching":
                await asyncio.sleep(60.0)
            yield Check(f"{name}: second", True, "")

        return played

    async def calibrate(probe: Any, plan: SelfTestPlan, _deadline: float) -> None:
        asked.append(("calibrate", plan.timed, dict(probe.sampling)))

    for name in ("greedy", "states", "samples", "switching"):
        monkeypatch.setattr(selftest, f"{name}_stage", stage(name))
    monkeypatch.setattr(selftest, "calibrate", calibrate)
    engine_: Any = engine
    return asyncio.run(selftest.run_self_test(engine_, SelfTestPlan(**{**PLAN, **changes}))), asked


def test_law_2_a_stage_that_fails_or_takes_too_long_fails_the_test_and_keeps_what_it_has_shown(monkeypatch):
    engine = Engine()
    report, asked = run(monkeypatch, engine)
    drafting = [3, 3, 3]
    assert asked == [
        ("greedy", drafting),
        ("samples", drafting),
        ("switching", drafting),
        ("calibrate", (0, 1, 3), {"temperature": 1.0, "top_p": 0.9}),
    ]
    found = {check.name: (check.passed, check.detail, check.out_of_time) for check in report.checks}
    assert found == {
        "greedy: first": (True, "", False),
        "greedy: second": (True, "", False),
        "samples: first": (True, "", False),
        "samples": (False, "ValueError: half-way", False),
        "switching: first": (True, "", False),
        "switching": (False, "not finished within the time limit of 0.2 s", True),
        "break-even": (True, "batch size: acceptance length: nothing measured in time", False),
    }
    assert not report.passed and engine.table == [0, 1, 2], "it is given back as it was"


def test_a_target_with_states_is_asked_for_them_and_timed_with_whole_drafts(monkeypatch):
    _, asked = run(monkeypatch, Engine(hybrid=True), whole=True)
    assert [name for name, *_ in asked] == ["greedy", "states", "samples", "switching", "calibrate"]
    assert asked[-1][1] == (0, 3)


@pytest.mark.parametrize(
    ("part", "stages"),
    [
        (SelfTestPart.ALL, {"greedy", "states", "samples", "switching", "break-even"}),
        (SelfTestPart.START, {"greedy", "break-even"}),
        (SelfTestPart.DRAFTS, {"greedy", "states", "samples", "switching"}),
    ],
)
def test_a_part_asks_what_is_due_and_no_more(monkeypatch, part, stages):
    engine = Engine(hybrid=True)
    report, asked = run(monkeypatch, engine, part=part)
    assert engine.called[-1] == "spec_take_steps", "what the test's own steps took is part of no rollout"
    named = {name for name, *_ in asked if name != "calibrate"} | {c.name.split(":")[0] for c in report.checks}
    assert named == stages and ("calibrate" in [name for name, *_ in asked]) == ("break-even" in stages)


def test_an_engine_that_does_not_answer_is_asked_nothing_more(monkeypatch):
    report, asked = run(monkeypatch, Engine(gone="spec_schedule_state"))
    assert not asked and [(c.name, c.passed) for c in report.checks] == [("engine", False)]


@pytest.mark.parametrize(
    ("k", "whole", "timed"), [(1, False, (0, 1)), (2, False, (0, 1, 2)), (8, False, (0, 1, 3, 8)), (8, True, (0, 8))]
)
def test_the_numbers_of_tokens_that_are_timed(k, whole, timed):
    assert SelfTestPlan(**{**PLAN, "k": k, "whole": whole}).timed == timed


def test_an_engine_that_is_not_given_back_fails_the_test(monkeypatch):
    report, asked = run(monkeypatch, Engine(gone="spec_pause"))
    assert not asked and [c.name for c in report.checks if not c.passed] == ["engine", "restore"]


@pytest.mark.parametrize(("step_s", "sizes"), [(0.15, {1: 1, 4: 1}), (0.02, {1: 6, 4: 6})])
def test_a_slow_engine_times_all_batch_sizes_of_a_draft_that_knows_nothing_before_any_twice(
    monkeypatch: pytest.MonkeyPatch, step_s: float, sizes: dict[int, int]
) -> None:
    """SmolLM2-135M on a slow CPU took 0.15 s a step: 17 tokens of each setting at one request were all that 12 s had room for."""
    now, timed = [0.0], []

    async def gathered(samples: list[Any]) -> None:
        (tokens,) = {*samples}
        now[0] += tokens * step_s
        timed.append(len(samples))

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(selftest.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(selftest, "gather_or_cancel", gathered)
    for name in ("put_in_force", "pause_idle_draft"):
        monkeypatch.setattr(selftest.channel, name, nothing)
    probe: Any = SimpleNamespace(
        engine=None, params=lambda tokens, plain: tokens, sample=lambda _, prompt, tokens: tokens
    )
    plan = SelfTestPlan(**{**PLAN, "k": 8, "max_num_seqs": 4, "seconds": 30.0, "part": SelfTestPart.START})
    asyncio.run(selftest.calibrate(probe, plan, selftest.TIMED_LEAST * plan.seconds))
    settings = len(plan.timed) + 1
    assert {size: timed.count(size) / settings for size in timed} == sizes
