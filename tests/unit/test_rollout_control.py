"""What an actor process does around each rollout phase, with a link that writes down what is asked of the engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_training import TARGET, sync

from spec_plugin import SpecConfig
from spec_plugin.actor.control import RolloutControl
from spec_plugin.events import DraftRefresh, EngineState, RefreshReport, RolloutStats, SelfTestReport
from spec_plugin.manager import create_manager
from spec_plugin.session import SpecSession


class Engines:
    """A link; nothing but the names of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.calls.append("install")
        return RefreshReport(True, refresh.draft_version, refresh.digest, 1.0)

    async def set_schedule(self, schedule: Any) -> None:
        self.calls.append("set schedule")

    async def self_test(self, seconds: float) -> SelfTestReport:
        self.calls.append("self-test")
        return SelfTestReport((), 1.0, ())

    async def start_phase(self, policy_version: int) -> None:
        self.calls.append("start phase")

    async def stats(self, policy_version: int) -> RolloutStats:
        self.calls.append("stats")
        return RolloutStats(policy_version, 0, 0, 0.0, 0, 0, 0, ())

    async def state(self, moment: str) -> EngineState:
        self.calls.append(f"read weights: {moment}")
        return EngineState(moment, 0, 0, "", "")


@pytest.mark.parametrize("sleeps", [True, False])
def test_nobody_reads_the_weights_of_an_engine_that_sleeps_by_then(sleeps):
    """verl puts its engines to sleep between the rollouts and the first pass over them."""
    engines = Engines()
    session = SpecSession(SpecConfig(audit=True), TARGET, create_manager(load_entry_points=False))
    control = RolloutControl(session, engines, sleeps=sleeps)
    asyncio.run(control.synced(sync(0)))
    asyncio.run(control.begin())
    while_awake = len(engines.calls)
    assert {"read weights: synced", "read weights: refreshed", "read weights: rollout"} < set(engines.calls)
    asyncio.run(control.finish())
    assert engines.calls[while_awake:] == ["stats"] + (["read weights: rolled out"] if not sleeps else [])
