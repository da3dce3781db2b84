"""RolloutControl: what an adapter's actor process does around each rollout phase, the same for every trainer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from spec_plugin.errors import LosslessError
from spec_plugin.events import (
    DraftRefresh,
    EngineState,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    WeightSync,
)
from spec_plugin.harvest import Harvester
from spec_plugin.session import SpecSession

logger = logging.getLogger(__name__)
T = TypeVar("T")


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

    The draft travels through Ray's object store, whatever carries the policy's weights.
    """

    def __init__(self, engines: Sequence[Any], timeout_s: float) -> None:
        self._engines, self.timeout_s = engines, timeout_s

    def engines(self) -> Sequence[Any]:
        """Handles of all engines that this process answers for."""
        return self._engines

    async def all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every engine at once.

        Raises:
            TimeoutError: if one does not answer in time.
        """
        calls = [getattr(engine, method).remote(*args) for engine in self.engines()]
        return list(await asyncio.wait_for(asyncio.gather(*calls), timeout_s or self.timeout_s))

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        """Every engine installs this draft."""
        return merge_refreshes(await self.all("spec_refresh", refresh, force))

    async def set_schedule(self, schedule: Schedule) -> None:
        """k per batch size."""
        await self.all("spec_set_schedule", schedule)

    async def self_test(self, seconds: float) -> SelfTestReport:
        """Every engine is tested, all at once."""
        return merge_reports(await self.all("spec_self_test", seconds, timeout_s=4 * seconds + 300))

    async def start_phase(self, policy_version: int) -> None:
        """Counters and clocks start anew."""
        await self.all("spec_start_phase", policy_version)

    async def stats(self, policy_version: int) -> RolloutStats:
        """What the engines did."""
        return merge_stats(await self.all("spec_stats", policy_version))

    async def state(self, moment: str) -> EngineState:
        """What the engines hold."""
        return merge_states(await self.all("spec_state", moment))


class RolloutControl:
    """Refresh after each weight sync, self-test, schedule, and the counters of each phase.

    The adapter calls ``synced`` when target weights have reached the engine, ``begin`` when generation may start, and
    ``finish`` at the first pass of the trainer over what was generated.
    """

    def __init__(self, session: SpecSession, link: EngineLink | None) -> None:
        """Bind session and engines.

        Args:
            session: of this actor process.
            link: the engines; None in data-parallel ranks that do not talk to one (they train the same draft).
        """
        self.session, self.link = session, link
        self.policy_version = -1  # of the weights that the engines roll out with
        self.speculating = False  # was any k > 0 in the current phase
        self._tested: int | None = None  # draft version of the last self-test
        self._running: int | None = None  # policy version of the phase in progress
        self._installed = -1  # draft version that the engines serve
        self._slice_ended = time.monotonic()

    async def synced(self, event: WeightSync) -> None:
        """Target weights of this version have reached the engines: refresh the draft at the same safe point."""
        self.policy_version = event.policy_version
        await self._audit("synced")
        refresh = self.session.weight_sync(event)
        if refresh is None or self.link is None:
            return
        began = time.perf_counter()
        try:
            # the same version again: after sleep, or an untrained draft
            report = await self.link.install(refresh, force=refresh.draft_version == self._installed)
        except Exception as error:  # law 6
            self.session.fail("refresh", error)
            return
        self._installed = report.draft_version
        self.session.refreshed(refresh, replace(report, milliseconds=(time.perf_counter() - began) * 1e3))
        await self._audit("refreshed")

    async def begin(self) -> None:
        """Self-test before the first rollout, and once more before a trained draft is first served; then set k.

        Raises:
            LosslessError: if the engine does not sample from the target.
        """
        session, link = self.session, self.link
        if link is None:
            session.rollout_start(self.policy_version)
            return
        if self._tested is None:
            await self._self_test(link)
            self._slice_ended = time.monotonic()  # start-up is no part of the first step
        schedule = session.schedule(self.policy_version)
        if schedule is not None and any(schedule.table) and self._tested == 0 < self._installed:
            # a newborn draft is never right, so only now can the sampler's accepting half be seen at work
            began = time.monotonic()
            await self._self_test(link)
            self._slice_ended += time.monotonic() - began  # the draft's share is one of the step, not of the test
            schedule = session.schedule(self.policy_version)
        if schedule is not None:
            try:
                await link.set_schedule(schedule)
            except Exception as error:  # law 6
                session.fail("schedule", error)
            self.speculating = any(schedule.table)
        await link.start_phase(self.policy_version)
        await self._audit("rollout")
        session.rollout_start(self.policy_version)
        self._running = self.policy_version

    async def _self_test(self, link: EngineLink) -> None:
        session = self.session
        self._tested = max(0, self._installed)
        if not session.config.self_test or session.failed:
            return
        seconds = session.config.self_test_seconds
        report = await link.self_test(seconds)
        if report.out_of_time:
            logger.warning(
                "spec-plugin: %g s were too few for the self-test, once more with %g s", seconds, 4 * seconds
            )
            report = await link.self_test(4 * seconds)
        if report.passed:
            lines = "".join(f"\n  {check.name}: {check.detail}" for check in report.checks)
            logger.info("spec-plugin: the self-test passed in %.1f s%s", report.seconds, lines)
            session.engine_ready(report)
            return
        message = (
            f"the start-up self-test failed after {report.seconds:.1f} s, speculation is not used:\n{report.failures()}\n"
            "`spec-plugin doctor` shows which patches and capabilities this engine has"
        )
        if session.config.on_self_test_failure == "raise" and not report.out_of_time:
            raise LosslessError(message)
        session.fail("self-test", message)

    async def finish(self) -> None:
        """Collect what the engines did in the phase; later calls do nothing until the next ``begin``."""
        if self._running is None or self.link is None:
            return
        version, self._running = self._running, None
        try:
            stats = await self.link.stats(version)
        except Exception as error:  # law 6
            self.session.fail("rollout statistics", error)
            return
        self.session.rollout_end(stats)
        await self._audit("rolled out")

    def train_draft(self, step: int) -> None:
        """One slice of draft training, bounded to ``train_share`` of the whole step; every data-parallel rank calls it."""
        session = self.session
        if on_any_rank(session.failed) and not session.failed:
            session.fail(
                "another rank", "its own warning says why"
            )  # one draft for all: stop together or wait for ever
        began = time.monotonic()
        share = session.config.train_share
        session.train_draft(step, share / (1.0 - share) * (began - self._slice_ended))
        self._slice_ended = time.monotonic()

    async def _audit(self, moment: str) -> None:
        if not self.session.config.audit or self.link is None:
            return
        try:
            self.session.audit(await self.link.state(moment))
        except Exception as error:  # law 6
            self.session.fail("audit", error)


class RolloutHarvest:
    """The harvest of one actor process: a budget of tokens for each rollout phase, and law 6 around it."""

    def __init__(self, control: RolloutControl, decoder: nn.Module, aux_layers: Sequence[int]) -> None:
        """Bind to what ``Harvester`` binds to; nothing is captured before ``open``."""
        self._control, self._harvester = control, Harvester(decoder, aux_layers)
        self._left = 0  # tokens that may still be harvested

    def open(self) -> None:
        """Allow ``harvest_tokens`` tokens from here on; none if no draft is trained."""
        config = self._control.session.config
        self._left = config.harvest_tokens if config.train else 0

    def close(self) -> None:
        """Capture nothing until the next ``open``."""
        self._left = 0

    @contextmanager
    def capture(self, documents: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]) -> Iterator[None]:
        """Capture the forward pass inside the block and hand it to the session, while there is budget.

        Args:
            documents: called after the pass, for the ``input_ids`` and ``loss_masks`` of ``Harvester.take``.
        """
        session = self._control.session
        if self._left <= 0 or session.failed:
            yield
            return
        with self._harvester.capture():
            yield
        try:
            hidden = self._harvester.take(*documents(), self._control.policy_version, self._left)
        except Exception as error:  # law 6: a failed harvest costs speculation, not the run
            session.fail("harvest", error)
            return
        if hidden is not None:
            self._left -= sum(hidden.lengths)
            session.target_forward(hidden)


def on_any_rank(flag: bool) -> bool:
    """True if it is True on any data-parallel rank; every rank must call it."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return flag
    flags: list[bool] = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, flag)
    return any(flags)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from a synchronous function, also under a running event loop (in a thread of its own then)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


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
    return replace(
        refused,
        installed=all(p.installed for p in parts),
        reason="; ".join(f"engine {i}: {p.reason}" for i, p in enumerate(parts) if p.reason),
    )


def merge_states(parts: Sequence[EngineState]) -> EngineState:
    """Several engines' states as one.

    Raises:
        RuntimeError: if they differ.
    """
    if any(p != parts[0] for p in parts):
        raise RuntimeError(f"the engines do not hold the same: {parts}")
    return parts[0]
