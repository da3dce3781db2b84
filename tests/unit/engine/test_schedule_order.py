"""Law 2: at no moment does the engine's table ask for drafts that a paused draft does not make.

vLLM's V2 runner then verifies the rows that it drafted long ago, for whatever requests stood there, against their probabilities:
a favourite token that has 85 % came in 25 % of the samples.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from spec_plugin.api.events import EngineSchedule, Schedule
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan
from spec_plugin.engine.selftest.test import calibrate, restore
from spec_plugin.engine.vllm.schedule.channel import put_in_force

SEQS, K = 4, 3


class Running:
    """An engine with requests in flight: it steps before and behind each call, as EngineCore does between utility calls."""

    def __init__(self, table: list[int], paused: bool) -> None:
        self.table, self.paused = table, paused
        self.steps: list[tuple[int, bool]] = []  # drafted tokens that are verified, and whether nobody has drafted them
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logprobs", max_logprobs=20))
        self.refuses = False

    @property
    def engine_core(self) -> Running:
        return self

    @property
    def stale(self) -> list[tuple[int, bool]]:
        """Steps that verify what was not drafted for them."""
        return [step for step in self.steps if step[0] and step[1]]

    def _step(self) -> None:
        self.steps.append((max(self.table), self.paused))

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        self._step()
        if name == "spec_set_schedule":
            if self.refuses:
                raise ValueError("refused")
            self.table = list(args[0])
        elif name == "spec_pause":
            (self.paused,) = args
        self._step()
        return {"table": self.table} if name != "spec_take_steps" else []

    async def reset_prefix_cache(self) -> None:
        self._step()


DRAFTS, NOTHING = [K] * (SEQS + 1), [0] * (SEQS + 1)


@pytest.mark.parametrize("first", [DRAFTS, NOTHING], ids=["drafting", "plain"])
def test_law_2_a_table_is_changed_while_requests_run(first):
    engine = Running(list(first), paused=not any(first))
    for table in (NOTHING, DRAFTS, DRAFTS, NOTHING, NOTHING, DRAFTS):
        said = asyncio.run(put_in_force(engine, Schedule(tuple(table))))
        assert engine.table == table and engine.paused == (not any(table))
        assert said == EngineSchedule(Schedule(tuple(table))), "it says what is in force"
    assert engine.stale == []


def test_law_2_a_table_that_is_refused_leaves_no_draft_paused_under_one_that_drafts():
    for before in (DRAFTS, NOTHING):
        engine = Running(list(before), paused=not any(before))
        engine.refuses = True
        for table in (DRAFTS, NOTHING):
            with pytest.raises(ValueError, match="refused"):
                asyncio.run(put_in_force(engine, Schedule(tuple(table))))
        assert engine.stale == []


def test_law_2_the_calibration_takes_turns_between_drafting_and_not():
    async def nothing(*_: Any) -> None:
        pass

    engine = Running(list(DRAFTS), paused=False)
    probe: Any = SimpleNamespace(engine=engine, max_num_seqs=SEQS, params=lambda *_, **__: None, sample=nothing)
    plan = SelfTestPlan(
        prompts=[[1]], sampling={}, k=K, vocab_size=8, alpha=1e-6, seconds=1.0, limit=1.0, max_num_seqs=SEQS
    )
    asyncio.run(calibrate(probe, plan, deadline=float("inf")))
    assert {k for k, _ in engine.steps} == {0, 1, K} and engine.stale == []


@pytest.mark.parametrize("paused", [True, False])
def test_law_2_the_self_test_gives_the_engine_back_as_it_was(paused):
    """It may end in the midst of a calibration, with the draft paused."""
    engine: Any = Running(list(NOTHING if paused else DRAFTS), paused)
    asyncio.run(restore(engine, list(DRAFTS)))
    assert (engine.table, engine.paused, engine.stale) == (DRAFTS, False, [])
