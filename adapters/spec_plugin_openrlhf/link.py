"""How the policy actor reaches OpenRLHF's vLLM actors: plain Ray calls, to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from spec_plugin.events import DraftRefresh, EngineState, RefreshReport, RolloutStats, SelfTestReport
from spec_plugin.rollout import merge_refreshes, merge_reports, merge_states, merge_stats


class EnginesLink:
    """All engines of the run; the draft travels through Ray's object store, whatever carries the policy's weights."""

    def __init__(self, engines: Sequence[Any], timeout_s: float) -> None:
        self._engines, self._timeout = engines, timeout_s

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        calls = [getattr(engine, method).remote(*args) for engine in self._engines]
        return list(await asyncio.wait_for(asyncio.gather(*calls), timeout_s or self._timeout))

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        """Every engine installs this draft."""
        return merge_refreshes(await self._all("spec_refresh", ray.put(refresh), force))

    async def set_schedule(self, table: Sequence[int]) -> None:
        """k per batch size."""
        await self._all("spec_set_schedule", list(table))

    async def self_test(self, seconds: float) -> SelfTestReport:
        """Every engine is tested, all at once."""
        return merge_reports(await self._all("spec_self_test", seconds, timeout_s=4 * seconds + 300))

    async def start_phase(self, policy_version: int) -> None:
        """Counters and clocks start anew."""
        await self._all("spec_start_phase", policy_version)

    async def stats(self, policy_version: int) -> RolloutStats:
        """What the engines did."""
        return merge_stats(await self._all("spec_stats", policy_version))

    async def state(self, moment: str) -> EngineState:
        """What the engines hold."""
        return merge_states(await self._all("spec_state", moment))
