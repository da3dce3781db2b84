"""A link to engines that writes down the names of the calls."""

from __future__ import annotations

from typing import Any

from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    SelfTestReport,
)
from spec_plugin.api.spans import FORGOTTEN, Span


class Engines:
    """A link; nothing but the names of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.calls.append("install")
        return RefreshReport(True, refresh.draft_version, refresh.digest, 1.0)

    async def set_schedule(self, schedule: Any) -> EngineSchedule:
        self.calls.append("set schedule")
        return EngineSchedule(schedule)

    async def self_test(self, seconds: float) -> SelfTestReport:
        self.calls.append("self-test")
        return SelfTestReport((), 1.0, ())

    async def start_phase(self, policy_version: int) -> None:
        self.calls.append("start phase")

    async def stats(self, policy_version: int) -> RolloutStats:
        self.calls.append("stats")
        return RolloutStats(policy_version, 0, 0, 0.0, 0, 0, 0, ())

    async def spans(self) -> list[Span]:
        self.calls.append("spans")
        return [FORGOTTEN]  # no row is held against what a fake has not sampled

    async def state(self, moment: str) -> EngineState:
        self.calls.append(f"read weights: {moment}")
        return EngineState(moment, 0, 0, "", "")
