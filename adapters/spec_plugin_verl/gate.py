"""When a server of verl may roll out: after a weight sync not before the draft is in, and the engine tested.

In verl's hybrid modes the actor process stands between sync and rollout, and nothing needs to wait. A *standalone* engine gets
its weights from another machine, and verl opens its gate as soon as they are there; so the gate itself waits for the actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from verl.workers.rollout.replica import RolloutMode

from spec_plugin.adapter import (
    Check,
    EngineSchedule,
    LosslessError,
    Schedule,
    SelfTestPart,
    SelfTestReport,
    SpecConfigError,
    SpecEngineMethods,
    pass_on,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.01


class Gate(SpecEngineMethods):
    """Mixed into verl's server, before it: counts syncs, and holds requests back until the actor has begun the phase."""

    engine: Any
    global_steps: int | None
    node_rank: int
    rollout_mode: RolloutMode

    _spec_syncs = 0
    _spec_awake = True
    _spec_described = False  # has an actor asked for the options
    _spec_at_gate = False  # standalone: with the weights of a sync, awake, without a request
    _spec_gone = 0  # syncs after which the actor let the requests in
    _spec_given_up = 0  # the last sync after which the gate opened without the actor
    _spec_problem = ""  # why the run must stop
    _spec_testing = False
    _spec_heard = 0.0  # when the actor was last known to be busy with us

    async def spec_admitted(self) -> None:
        """Where verl's gate is shut a request waits there; it is in flight, and drawn for the control group, only behind it."""
        while self._submission_paused and not self._rejecting:  # type: ignore[attr-defined]
            await self._resume_event.wait()  # type: ignore[attr-defined]

    async def set_global_steps(self, global_steps: int) -> None:
        """verl's, called when the weights of a sync are in place."""
        await super().set_global_steps(global_steps)  # type: ignore[misc]
        self._spec_syncs += 1

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """verl's; weights come back first, the KV cache last."""
        await super().wake_up(tags)  # type: ignore[misc]
        self._spec_awake = tags is None or "kv_cache" in tags

    async def sleep(self) -> None:
        """verl's; from here on ``spec_synced`` waits for the wake-up."""
        self._spec_awake = False
        await super().sleep()  # type: ignore[misc]

    async def spec_synced(self, syncs: int, awake: bool) -> None:
        """Wait for the weights of the n-th sync; and, if ``awake``, until this replica can generate."""
        while self._spec_syncs < syncs or (awake and not self._spec_awake):
            await asyncio.sleep(_POLL_S)

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> Any:
        """verl's; only asynchronous trainers cut requests short, to have them go on under the next policy."""
        self._spec_front.interrupted = True
        return await super().abort_all_requests(*args, **kwargs)  # type: ignore[misc]

    async def open_submission_gate(self) -> None:
        """verl's; a standalone engine admits requests only when the actor has refreshed the draft and begun the phase.

        Raises:
            LosslessError: if the self-test found that an engine does not sample from the target.
            SpecConfigError: if there is no actor that could say so.
        """
        if self.rollout_mode == RolloutMode.STANDALONE and self.node_rank == 0:
            await self._spec_wait()
        await super().open_submission_gate()  # type: ignore[misc]

    async def _spec_wait(self) -> None:
        if not self._spec_described:
            raise SpecConfigError(
                "spec-plugin: no actor with this adapter has reached the rollout server: set actor.strategy=fsdp or fsdp2, "
                "or leave the flag out"
            )
        limit = self._spec_front.session.config.gate_timeout_s
        self._spec_at_gate, self._spec_heard = True, time.monotonic()
        while self._spec_gone < self._spec_syncs and time.monotonic() < self._spec_heard + limit:
            await asyncio.sleep(_POLL_S)
            if self._spec_testing:  # which has a limit of its own; without drafts it would find fault with the engine
                self._spec_heard = time.monotonic()
        self._spec_at_gate = False
        if self._spec_problem:
            raise LosslessError(self._spec_problem)
        if self._spec_gone < self._spec_syncs:
            logger.warning(
                "spec-plugin: the actor has not finished the draft refresh %g s after the weight sync (spec.gate_timeout_s): "
                "this engine rolls out without drafts until the next sync",
                limit,
            )
            self._spec_given_up = self._spec_syncs
            await self._spec_plain()

    @property
    def _spec_late(self) -> bool:
        """Has the gate opened without the actor: what it still says of this sync is for a phase that has begun plain."""
        return self._spec_gone < self._spec_syncs == self._spec_given_up

    async def spec_set_schedule(self, schedule: Schedule) -> EngineSchedule:
        """k per batch size for the coming phase; one that is rolled out already stays plain."""
        if self._spec_late and any(schedule.table):
            return self._spec_front.schedule
        return await super().spec_set_schedule(schedule)

    async def _spec_plain(self) -> None:
        """Nobody has said which draft is in: use none. The gate opens in any case (law 6)."""
        front = self._spec_front
        try:
            await asyncio.wait_for(front.go_plain(), front.session.config.refresh_timeout_s)
        except Exception as error:
            pass_on(error)
            logger.warning(
                "spec-plugin: this engine has not confirmed that it drafts nothing; what it samples is checked as drafted text",
                exc_info=error,
            )

    async def spec_description(self) -> tuple[Any, Any]:
        """Options and target, for actors that see no rollout configuration."""
        self._spec_described = True
        return self._spec_front.session.config, self._spec_front.session.target

    async def spec_at_gate(self, syncs: int) -> int:
        """Wait until this engine has the weights of the n-th sync, is awake and admits no request yet; their version.

        Where the gate has opened without the actor by then, it is late, and need not wait.
        """
        while self._spec_syncs < syncs or not (self._spec_at_gate or self._spec_given_up >= syncs):
            await asyncio.sleep(_POLL_S)
        return int(self.global_steps or 0)

    async def spec_go(self, syncs: int, problem: str) -> EngineSchedule:
        """The actor has begun the phase after its n-th sync, or the run must stop for this reason; what is in force in it."""
        self._spec_gone, self._spec_problem = syncs, problem
        return self._spec_front.schedule

    async def spec_self_test(
        self, seconds: float, engines: int = 1, part: SelfTestPart = SelfTestPart.ALL
    ) -> SelfTestReport:
        """The self-test on this engine (law 2); one that is paused between two phases runs for it.

        Where the gate has opened without the actor nothing is tested, and so nothing proven.

        Raises:
            RuntimeError: if requests are in flight all the same.
        """
        if self._spec_late:
            late = "the gate has opened without the actor (spec.gate_timeout_s), and the engine rolls out"
            return SelfTestReport((Check("gate", False, late, out_of_time=True),), 0.0)
        if self._spec_front.busy:
            raise RuntimeError("the self-test needs an engine without requests, and this one has some in flight")
        self._spec_testing = True
        paused = await self.engine.is_paused()
        if paused:
            await self.engine.resume_generation()
        try:
            return await super().spec_self_test(seconds, engines, part)
        finally:
            self._spec_testing = False
            if paused:
                await self.engine.pause_generation()
