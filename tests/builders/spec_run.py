"""Steps of a ``SpecRun`` by hand, and a link to engines that writes down the names of the calls."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    SelfTestPart,
    SelfTestReport,
    WeightSync,
)
from spec_plugin.api.spans import FORGOTTEN, Span, Spans
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun


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

    async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
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


def run_of(session: SpecSession, link: Any, **options: Any) -> SpecRun:
    """A run whose log-prob passes nobody harvests."""
    harvest: Any = object()
    return SpecRun(session, link, harvest=lambda _: harvest, **options)


def synced(run: SpecRun, event: WeightSync) -> None:
    """A weight sync, behind which rollouts do not begin yet."""
    shared = event.embed, event.lm_head
    asyncio.run(run.weights_synced(event.policy_version, *shared, copied=True, rollouts_begin=False))


def trained(run: SpecRun, step: int) -> None:
    """The trainer's update of a step whose log-probs were checked."""
    run._checked = True
    run.policy_updated(step)


def spans_of(run: SpecRun, told: bool = True) -> Spans:
    """What the engines say when they are asked anew."""
    run._asked = False
    version, none = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0)
    return run._engine_spans(Responses([], [], none, none, (version, version) if told else None))
