"""The link: how the first actor rank reaches every engine of every replica, and how their answers become one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from spec_plugin.events import DraftRefresh, EngineState, RefreshReport, RolloutStats, Schedule, SelfTestReport


class EngineLink(Protocol):
    """How the actor process reaches its engines; each call reaches all of them, and answers for all of them."""

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        """Send a draft and have it installed, all or nothing; ``force`` when its version is not newer."""

    async def set_schedule(self, schedule: Schedule) -> None:
        """``EngineFront.set_schedule`` on every engine."""

    async def self_test(self, seconds: float) -> SelfTestReport:
        """``EngineFront.self_test`` on every engine; see ``merge_reports``."""

    async def start_phase(self, policy_version: int) -> None:
        """``EngineFront.start_phase`` on every engine."""

    async def stats(self, policy_version: int) -> RolloutStats:
        """``EngineFront.stats`` of every engine; see ``merge_stats``."""

    async def state(self, moment: str) -> EngineState:
        """``EngineFront.state`` of every engine; see ``merge_states``."""


class ActorsLink:
    """Engines that are Ray actors with the methods of ``spec_plugin.engine.front.SpecEngineMethods``: plain remote calls.

    The draft travels through Ray's object store, once for all engines, whatever carries the policy's weights.
    """

    def __init__(
        self, engines: Sequence[Any], timeout_s: float, put: Callable[[DraftRefresh], Any] = lambda refresh: refresh
    ) -> None:
        """Bind to actors that run, or will run.

        Args:
            engines: their handles.
            timeout_s: for each call, unless it says otherwise.
            put: ``ray.put``; without it a draft is copied once for each engine.
        """
        self._engines, self.timeout_s, self._put = engines, timeout_s, put

    def engines(self) -> Sequence[Any]:
        """Handles of all engines of the run."""
        return self._engines

    async def all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every engine at once.

        Raises:
            TimeoutError: if one does not answer in time.
        """
        calls = [getattr(engine, method).remote(*args) for engine in self.engines()]
        return list(await asyncio.wait_for(asyncio.gather(*calls), timeout_s or self.timeout_s))

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        """Every engine installs this draft, or all go back to the one that they served.

        Raises:
            RuntimeError: if an engine could not go back.
        """
        several = len(self.engines()) > 1
        # a GPU's memory does not travel
        stored = self._put(replace(refresh, tensors={n: t.detach().cpu() for n, t in refresh.tensors.items()}))
        report = merge_refreshes(await self.all("spec_refresh", stored, force, several))
        if several:  # each holds on to its previous draft until it is known what became of the others
            await self.all("spec_settle", report.installed)
        return report

    async def set_schedule(self, schedule: Schedule) -> None:
        """k per batch size."""
        await self.all("spec_set_schedule", schedule)

    async def self_test(self, seconds: float) -> SelfTestReport:
        """Every engine is tested, all at once."""
        return merge_reports(
            await self.all("spec_self_test", seconds, len(self.engines()), timeout_s=4 * seconds + 300)
        )

    async def start_phase(self, policy_version: int) -> None:
        """Counters and clocks start anew."""
        await self.all("spec_start_phase", policy_version)

    async def stats(self, policy_version: int) -> RolloutStats:
        """What the engines did."""
        return merge_stats(await self.all("spec_stats", policy_version))

    async def state(self, moment: str) -> EngineState:
        """What the engines hold."""
        return merge_states(await self.all("spec_state", moment))


def merge_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """Several engines' phases as one: counts add up, the slowest decides the time."""
    positions = max(len(p.accepted_per_pos) for p in parts)
    per_pos = [sum(p.accepted_per_pos[i] for p in parts if i < len(p.accepted_per_pos)) for i in range(positions)]
    return RolloutStats(
        policy_version=parts[0].policy_version,
        requests=sum(p.requests for p in parts),
        tokens=sum(p.tokens for p in parts),
        seconds=max(p.seconds for p in parts),
        drafts=sum(p.drafts for p in parts),
        draft_tokens=sum(p.draft_tokens for p in parts),
        accepted_tokens=sum(p.accepted_tokens for p in parts),
        accepted_per_pos=tuple(per_pos),
        steps=tuple(s for p in parts for s in p.steps),
    )


def merge_reports(parts: Sequence[SelfTestReport]) -> SelfTestReport:
    """Several engines' self-tests as one: every check of every engine counts."""
    if len(parts) == 1:
        return parts[0]
    checks = [replace(c, name=f"engine {i} {c.name}") for i, p in enumerate(parts) for c in p.checks]
    return SelfTestReport(tuple(checks), max(p.seconds for p in parts), tuple(s for p in parts for s in p.steps))


def merge_refreshes(parts: Sequence[RefreshReport]) -> RefreshReport:
    """Several engines' refreshes as one: installed only if every engine installed it."""
    refused = next((p for p in parts if not p.installed), parts[0])
    reasons = [f"engine {i}: {p.reason}" if len(parts) > 1 else p.reason for i, p in enumerate(parts) if p.reason]
    return replace(refused, installed=all(p.installed for p in parts), reason="; ".join(reasons))


def merge_states(parts: Sequence[EngineState]) -> EngineState:
    """Several engines' states as one.

    Raises:
        RuntimeError: if they differ.
    """
    if any(p != parts[0] for p in parts):
        raise RuntimeError(f"the engines do not hold the same: {parts}")
    return parts[0]
