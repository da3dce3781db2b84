"""A trainer's steps around a real session and control, with engines that break when they are told to."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from builders.law6_faults import Drafter, FakeLink, Fault
from builders.spec_run import run_of, synced, trained
from builders.training import TARGET, hidden, sync
from spec_plugin import SpecConfig
from spec_plugin.api.events import DraftRefresh, EngineSchedule, RefreshReport, Schedule, SelfTestPart, SelfTestReport
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession


class Engines(FakeLink):
    """Writes down what is asked of the engines, and fails in a call while ``broken``."""

    def __init__(self) -> None:
        super().__init__(Fault("", ""))
        self.asked: list[str] = []
        self.forced: list[bool] = []
        self.seconds: list[float] = []
        self.broken = ""
        self.report = SelfTestReport((), 1.0)

    async def _asked(self, name: str) -> None:
        self.asked.append(name)
        if name == self.broken:
            raise RuntimeError(f"{name} is broken")

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        await self._asked("install")
        self.forced.append(force)
        return RefreshReport(True, refresh.draft_version, refresh.digest, 1.0)

    async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
        await self._asked("self_test")
        self.seconds.append(seconds)
        return self.report

    async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
        await self._asked("drafts" if any(schedule.table) else "plain")
        answer: EngineSchedule = await super().set_schedule(schedule)
        return answer


class Run:
    """A trainer's steps around a real session and control."""

    def __init__(self, **options: Any) -> None:
        manager = create_manager(block=("eagle3",), load_entry_points=False)
        manager.register(Drafter())
        config = SpecConfig(serve="always", refresh_timeout_s=5.0, **options)
        self.engines = Engines()
        self.control = run_of(SpecSession(config, TARGET, manager), self.engines)
        self.session, self.version = self.control.session, 0

    def step(self) -> list[str]:
        """One step; what was asked of the engines in it."""
        self.engines.asked.clear()
        synced(self.control, sync(self.version))
        asyncio.run(self.control.rollouts_begin())
        self.session.target_forward(hidden(torch.arange(12), self.version))
        asyncio.run(self.control.rollouts_end())
        trained(self.control, self.version)
        self.version += 1
        return list(self.engines.asked)
