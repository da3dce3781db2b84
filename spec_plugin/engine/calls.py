"""What the actor may ask of an engine: each method here is called by its name, from another process where need be."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.rollouts import Rollout
from spec_plugin.api.spans import Span
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.sleep import PARTS


class SpecEngineMethods:
    """What ``ActorsLink`` calls, for an actor class that keeps its ``EngineFront`` in ``_spec_front``."""

    _spec_front: EngineFront

    def _spec_woken(self, *parts: str) -> AbstractAsyncContextManager[None]:
        """Around what needs these parts (``engine.sleep.PARTS``) of an engine that its trainer may have put to sleep."""
        return nullcontext()

    async def spec_refresh(self, refresh: DraftRefresh, force: bool, hold: bool = False) -> RefreshReport:
        """Have the workers install one draft, all or nothing; ``hold`` the previous one until ``spec_settle``."""
        async with self._spec_woken("weights"):
            return await self._spec_front.install_tensors(refresh, force, hold)

    async def spec_settle(self, keep: bool) -> None:
        """After a refresh with ``hold``: keep it, or go back to the draft before."""
        async with self._spec_woken("weights"):
            await self._spec_front.engine.collective_rpc("spec_settle", args=(keep,))

    async def spec_set_schedule(self, schedule: Schedule) -> EngineSchedule:
        """Install k per batch size for the coming phase; returns what is then in force."""
        return await self._spec_front.set_schedule(schedule)

    async def spec_self_test(
        self, seconds: float, engines: int = 1, part: SelfTestPart = SelfTestPart.ALL
    ) -> SelfTestReport:
        """The self-test on this engine, one of so many, or a part of it (law 2)."""
        async with self._spec_woken(*PARTS):
            return await self._spec_front.self_test(seconds, engines, part)

    async def spec_start_phase(self, policy_version: int) -> None:
        """Reset the counters and the clock: a rollout phase begins."""
        self._spec_front.start_phase(policy_version)

    async def spec_stats(self, policy_version: int) -> RolloutStats:
        """Counts, acceptance and step timings since ``spec_start_phase``."""
        return await self._spec_front.stats(policy_version)

    async def spec_take_rollouts(self, most_tokens: int, more: bool) -> list[Rollout]:
        """At most so many tokens of rollouts sampled since the last call, or of what that has left over; between phases."""
        of_workers = await self._spec_front.engine.collective_rpc("spec_take_rollouts", args=(most_tokens, more))
        return [Rollout(*row) for row in of_workers[0]]  # all ranks of an engine see the same

    async def spec_remember(self, parts: Sequence[Sequence[Rollout]], own: int | None) -> None:
        """Have the method draft from rollouts of other engines, part by part, or of a former run; ``own`` part it knows."""
        rows = [[rollout.prompt, rollout.response] for i, part in enumerate(parts) if i != own for rollout in part]
        if rows:
            await self._spec_front.engine.collective_rpc("spec_remember", args=(rows,))

    async def spec_take_spans(self) -> list[Span]:
        """What this engine sampled since the last call, stretch by stretch."""
        return self._spec_front.take_spans()

    async def spec_state(self, moment: str) -> EngineState:
        """Digests of the weights that the workers hold, for ``spec.audit``; reads all of them."""
        async with self._spec_woken("weights"):
            return await self._spec_front.state(moment)


class EngineCalls(SpecEngineMethods):
    """``SpecEngineMethods`` of an engine that lives in the actor's process, see ``spec_plugin.trainer.links.LocalLink``."""

    def __init__(self, front: EngineFront) -> None:
        self._spec_front = front
