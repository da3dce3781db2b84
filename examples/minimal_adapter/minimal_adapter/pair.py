"""The loop with several engines, and what its adapter does differently: a front and a link for each, and one answer of all.

Engines that are Ray actors have this in ``spec_plugin.actor.links.ActorsLink``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minimal_adapter.adapter import Link, MinimalAdapter
from minimal_adapter.loop import Settings, Trainer
from spec_plugin import events
from spec_plugin.actor.control import RolloutControl, RolloutHarvest
from spec_plugin.actor.decoder import find_decoder
from spec_plugin.actor.links import merge_refreshes, merge_reports, merge_states, merge_stats
from spec_plugin.engine.front import EngineFront
from spec_plugin.rollouts import Rollout


class PairAdapter(MinimalAdapter):
    """Every engine is refreshed, tested and scheduled alike."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.fronts = [self.front, *(EngineFront(self.session, None) for _ in range(settings.engines - 1))]
        self.links = [OneOfAPair(front) for front in self.fronts]
        self.control = RolloutControl(self.session, PairLink(self.links))
        self.harvest = RolloutHarvest(self.control, lambda: find_decoder(self.policy))

    def start_engine(self) -> None:
        """Start them; each front knows its own."""
        Trainer.start_engine(self)
        for front, link, llm in zip(self.fronts, self.links, self.engine.llms, strict=True):
            front.engine, link.engine = llm, self.engine

    async def request(self, index: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        """One request, on the clock of the engine that gets it."""
        with self.fronts[index % len(self.fronts)].request() as counted:
            answer = await Trainer.request(self, index, prompt)
            counted.tokens = len(answer[0])
        return answer


class OneOfAPair(Link):
    """The link to one of several."""

    async def settle(self, keep: bool) -> None:
        """After an install with ``hold``: let go of the draft before, or go back to it."""
        await self._there(self.front.settle(keep))

    async def self_test(self, seconds: float, engines: int = 1) -> events.SelfTestReport:
        """The start-up self-test, one of so many."""
        return await self._there(self.front.self_test(seconds, engines))


class PairLink:
    """spec_plugin's ``EngineLink`` for several engines in this process."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links

    async def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same call to every engine."""
        return list(await asyncio.gather(*(getattr(link, method)(*args, **kwargs) for link in self.links)))

    async def install(self, refresh: events.DraftRefresh, force: bool) -> events.RefreshReport:
        """Every engine installs this draft, or all go back to the one before."""
        report = merge_refreshes(await self.all("install", refresh, force, hold=True))
        await self.all("settle", report.installed)
        return report

    async def set_schedule(self, schedule: events.Schedule) -> None:
        """Tokens to draft for each batch size."""
        await self.all("set_schedule", schedule)

    async def self_test(self, seconds: float) -> events.SelfTestReport:
        """Every engine is tested; together they have the chance of a false alarm that one would have."""
        return merge_reports(await self.all("self_test", seconds, len(self.links)))

    async def start_phase(self, policy_version: int) -> None:
        """Counters start anew."""
        await self.all("start_phase", policy_version)

    async def stats(self, policy_version: int) -> events.RolloutStats:
        """Counters since then. What vLLM counts of drafts is one number for a process: that of the engine that started last."""
        *others, last = await self.all("stats", policy_version)
        none = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_per_pos": ()}
        return merge_stats([*(replace(part, **none) for part in others), last])

    async def share_rollouts(self) -> list[Rollout]:
        """For methods that draft from what was sampled before: each engine is told what the others sampled."""
        parts = await self.all("share_rollouts")
        for link, own in zip(self.links, parts, strict=True):
            await link.remember([rollout for part in parts if part is not own for rollout in part])
        return [rollout for part in parts for rollout in part]

    async def remember(self, rollouts: Sequence[Rollout]) -> None:
        """What a run before this one sampled."""
        await self.all("remember", rollouts)

    async def state(self, moment: str) -> events.EngineState:
        """What all of them hold."""
        return merge_states(await self.all("state", moment))
