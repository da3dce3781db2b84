"""RolloutControl: what an adapter's actor process does around each rollout phase, the same for every trainer."""

from __future__ import annotations

import asyncio
import logging
import operator
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from spec_plugin.api.answers import expect_instance, expect_list
from spec_plugin.api.errors import LosslessError
from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    WeightSync,
)
from spec_plugin.api.ranks import RanksPartedError, most_of_any_rank, of_first, on_any_rank
from spec_plugin.api.rollouts import CHUNK_TOKENS, Rollout
from spec_plugin.api.spans import FORGOTTEN, Span, Spans
from spec_plugin.api.speculation import Reason
from spec_plugin.api.witness import Witness
from spec_plugin.lifecycle.blocking import run_blocking
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.judged import share_for
from spec_plugin.trainer.links import EngineLink
from spec_plugin.trainer.slice_clock import SliceClock

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: times ``refresh_timeout_s`` after which a call is given up; a link's own limits come before (a refresh is two calls)
_PATIENCE = 3
#: seconds for which a self-test may be late beside that
_START = 300.0
#: different reasons of refused refreshes that are said; what makes each one different from all others is not worth a line
_REASONS = 20


class RolloutControl:
    """Refresh after each weight sync, self-test, schedule, and the counters of each phase.

    The adapter calls ``synced`` when target weights have reached the engines, ``begin`` when generation may start, and
    ``finish`` at the first pass of the trainer over what was generated; on every rank, though only the first one has a link.
    """

    def __init__(
        self,
        session: SpecSession,
        link: EngineLink | None,
        sleeps: bool = False,
        overlaps: bool = False,
        keep: Callable[[int, DraftRefresh | None], None] | None = None,
    ) -> None:
        """Bind session and engines.

        Args:
            session: of this actor process.
            link: all engines of the run, on the first actor rank; None on the others, which train the same draft.
            sleeps: have the engines no weights in memory at ``finish``.
            overlaps: do the engines generate while the trainer trains; a phase then lasts until the next weight sync.
            keep: takes policy version and draft of a rank without a link whose own process has an engine.
        """
        self.session, self.link, self._sleeps, self._overlaps = session, link, sleeps or overlaps, overlaps
        self._keep = keep
        self.ledger = session.ledger
        self.ledger.overlaps = overlaps
        self.lags = overlaps  # may sequences be older than the policy that recomputes them; see ``agree``
        self._spans = Spans()
        self.policy_version = -1  # of the weights that the engines roll out with
        self._tested: int | None = None  # draft version of the last self-test
        self._running: int | None = None  # policy version of the phase in progress
        self._recalled = False  # do the engines know what a run before this one has sampled
        self._installed = -1  # draft version that the engines serve
        self._anew = False  # was nothing sent to the engines since a fresh start
        self._warned: set[str] = set()  # what is said once
        self._was_hidden = False
        self._slices = SliceClock()
        if link is not None:
            self._warn_unchecked()

    def _warn_unchecked(self) -> None:
        if self.session.unguarded:
            logger.warning(
                "spec-plugin: %s: log-probs enter the loss without a check that they are the policy's (law 3)",
                self.session.unguarded,
            )
        if not self.session.config.self_test:
            logger.warning(
                "spec-plugin: spec.self_test=False: the engines are not tested, so one that does not sample from the policy "
                "goes unnoticed (law 2)"
            )

    @property
    def speculating(self) -> bool:
        """Do the engines draft in the phase; other ranks know after ``agree``. Before the first phase nothing was sampled."""
        engines = self.session.engines
        return engines is not None and engines.drafting

    def agree(self, failed_before: bool = False) -> bool:
        """Make all ranks know whether the phase drafted, and stop speculating together (collective).

        Args:
            failed_before: had speculation failed on this rank a moment ago.

        Returns:
            Whether it had on any rank, and has failed on none now: all begin anew, or none.
        """
        session = self.session
        first = self.link is not None
        by_choice = session.config.serve == "auto"
        drafted, hidden = self.speculating and first, self.ledger.hidden and first and by_choice
        try:
            drafted, self.lags, failed, session.hidden, failed_before = on_any_rank(
                drafted, self.lags, session.failed and not session.follows, hidden, failed_before
            )
        except RanksPartedError as error:
            session.fail(Reason.OTHER_TROUBLE, error, for_good=True, doing="the ranks' agreement")
            return False
        if first and hidden is not self._was_hidden:
            self._was_hidden = hidden
            logger.info(
                "spec-plugin: policy version %d: the trainer %s",
                self.policy_version,
                "does not wait for rollouts, so drafts would save nothing: none are served or trained until it does"
                if hidden
                else "waits for rollouts again: drafts go on",
            )
        if self.link is None:  # which table it is nobody has told this rank
            session.engines = EngineSchedule(None if drafted else session.plain_schedule)
        session.follow("another rank: its own warning says why" if failed else None)
        return failed_before and not failed

    async def synced(self, event: WeightSync) -> None:
        """Target weights of this version have reached the engines: refresh the draft at the same safe point (collective)."""
        if self._overlaps:
            await self._end_phase()
        self.policy_version = event.policy_version
        await self._audit("synced")
        failed = self.session.failed
        self.session.try_again()
        recovers = self.agree(failed)
        if recovers:
            self.session.recover()
        with self.ledger.spending():
            refresh = self.session.weight_sync(event)
        if recovers:
            # a plain phase, on which all ranks harvest and train again; what is sent and tested is sent behind the next sync,
            # for which all replicas were waited
            return
        unsent = refresh is None and self.session.method.draft is not None
        if self.session.recovering:
            # what is not sent now is tested when it is first served
            self.session.recovering, self._tested, self._anew = False, 0 if unsent else None, True
        with self.ledger.spending():
            await self._install(refresh)

    async def _reach(self, call: Awaitable[T], seconds: float = 0.0) -> T:
        """An answer of the engines, in time: a link may have forgotten its own limit, and nothing may wait for ever."""
        return await asyncio.wait_for(call, _PATIENCE * self.session.config.refresh_timeout_s + seconds)

    async def _reach_rollouts(self, call: Awaitable[T]) -> T:
        """The same of calls that hand rollouts on, chunk by chunk: each has the link's own limit, see ``CHUNK_TOKENS``."""
        config = self.session.config
        return await self._reach(call, 2 * (config.memory_tokens // CHUNK_TOKENS) * config.refresh_timeout_s)

    async def _install(self, refresh: DraftRefresh | None) -> None:
        if self._keep is not None:
            self._keep(self.policy_version, refresh)
        if self.link is None:
            return
        session = self.session
        # what the engines served before may be gone; a method without a draft of ours has nothing to lose
        dropped = session.config.sleep_level > 1 and session.method.draft is not None
        if refresh is None:
            if dropped and not session.failed:
                session.fail(Reason.REFRESH, RuntimeError("no draft was sent to engines that had dropped theirs"))
            return
        began = time.perf_counter()
        with self.session.guarded(Reason.REFRESH):
            # the same version again: after sleep, or an untrained draft
            force = self._anew or refresh.draft_version == self._installed
            report = expect_instance(
                await self._reach(self.link.install(refresh, force=force)), RefreshReport, "install"
            )
            self._installed, self._anew = operator.index(report.draft_version), False
            if not report.installed and dropped:
                raise RuntimeError(f"engines that sleep at level 2 have no draft before this one: {report.reason}")
            if not report.installed:
                self._warn_refused(refresh, report)
            self.session.refreshed(refresh, replace(report, milliseconds=(time.perf_counter() - began) * 1e3))
            await self._audit("refreshed")

    def _warn_refused(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        kind = re.sub(r"[0-9a-f]{8,}|\d+", "…", report.reason)
        if kind not in self._warned and len(self._warned) < _REASONS:
            self._warned.add(kind)
            logger.warning(
                "spec-plugin: the engines refused draft version %s and go on with version %s: %s. Further refusals for this "
                "reason are only counted, in spec/refresh_refused",
                *(refresh.draft_version, report.draft_version, report.reason or "they gave no reason"),
            )

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
            self._slices.restart()  # start-up is no part of the first step
        if not self._recalled and not session.failed:
            await self._recall(link)
        plain = session.plain_for is not None
        schedule = session.plain_schedule if plain else session.schedule(self.policy_version)
        if schedule is not None and any(schedule.table) and self._tested == 0 < self._installed:
            # an untrained draft is never right, so only now can the sampler's accepting half be seen at work
            began = time.monotonic()
            await self._self_test(link)
            self._slices.leave_out(time.monotonic() - began)  # the draft's share is one of the step, not of the test
            schedule = session.schedule(self.policy_version)
        await self._set(link, schedule)
        failed_before = session.failed
        with session.guarded(Reason.SCHEDULE, "the beginning of a phase"):
            await self._reach(link.start_phase(self.policy_version))
        await self._audit("rollout")
        session.rollout_start(self.policy_version)
        if session.failed and not failed_before and self.speculating:
            await self._set(link, session.plain_schedule)
        self._running = self.policy_version
        self.ledger.waits()

    async def _set(self, link: EngineLink, schedule: Schedule | None) -> None:
        """Set k, and know what the engines do: where they do not confirm drafts they are asked for none.

        If that is not confirmed either, what they sample counts as drafted (law 3).
        """
        session, plain = self.session, self.session.plain_schedule
        tables = [] if schedule is None else [schedule, plain] if any(schedule.table) else [plain]
        for wanted in tables:
            session.engines = EngineSchedule()  # one of several may have taken it before the others failed
            with session.guarded(Reason.SCHEDULE):
                wanted = replace(wanted, control_share=self._control_share)
                session.engines = expect_instance(
                    await self._reach(link.set_schedule(wanted)), EngineSchedule, "set_schedule"
                )
                break
        if schedule is None:
            session.engines = session.engines or EngineSchedule()
            self._warn_once(
                "spec-plugin: no plugin chooses how much to draft (the plugin controller is blocked, or returned None): the "
                "engines keep their table, which starts with spec.k=%d tokens at every batch size, also where plain "
                "decoding is faster; spec.serve has no effect",
                session.config.k,
            )
        elif session.failed and self.speculating:
            self._warn_once(
                "spec-plugin: the engines were told to stop drafting, and have not confirmed that they did. Until they do, "
                "what they sample is checked as drafted text; they are asked again before each rollout"
            )

    @property
    def _control_share(self) -> float | None:
        """Text that is older than the policy is measured by the plain text of its own step: each must have enough of it."""
        session = self.session
        if not self.lags or session.target.truncated:
            return None
        return share_for(session.config.control_share, session.judged_together)

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)

    async def _recall(self, link: EngineLink) -> None:
        """What a run before this one has sampled."""
        self._recalled = True
        if (memory := self.session.method.memory) is not None:
            with self.session.guarded(Reason.ENGINES, "recall"):
                if rollouts := expect_list(memory.recall(), Rollout, "recall"):
                    await self._reach_rollouts(link.remember(rollouts))

    async def _self_test(self, link: EngineLink) -> None:
        """Test the engines; nothing is found wrong where they do not answer, and nothing is proven.

        Raises:
            LosslessError: if they were found not to sample from the target.
        """
        session = self.session
        self._tested = max(0, self._installed)
        if not session.config.self_test or session.failed:
            return
        seconds = session.config.self_test_seconds
        with self.ledger.spending(), session.guarded(Reason.SELF_TEST):
            answer = await self._reach(link.self_test(seconds), 5 * seconds + _START)
            self._judge(expect_instance(answer, SelfTestReport, "self_test"))

    def _judge(self, report: SelfTestReport) -> None:
        session = self.session
        if report.passed:
            lines = "".join(f"\n  {check.name}: {check.detail}" for check in report.checks)
            logger.info("spec-plugin: the self-test passed in %.1f s%s", report.seconds, lines)
            for check in report.unproven:
                logger.warning("spec-plugin: the self-test found nothing wrong, but %s is %s", check.name, check.detail)
            session.engine_ready(report)
            return
        message = (
            f"the start-up self-test failed after {report.seconds:.1f} s, speculation is not used:\n{report.failures()}\n"
            "`spec-plugin doctor` shows which patches and capabilities this engine has"
        )
        if session.config.on_self_test_failure == "raise" and not report.out_of_time:
            raise LosslessError(message)
        session.fail(Reason.SELF_TEST, message, for_good=not report.out_of_time)

    async def finish(self) -> None:
        """Collect what the engines did in the phase; later calls do nothing until the next ``begin``.

        Where phases overlap with training this one goes on, and ``synced`` collects.
        """
        if not self._overlaps:
            await self._end_phase()

    async def _end_phase(self) -> None:
        if self._running is None or self.link is None:
            return
        version, self._running = self._running, None
        session = self.session
        memory = None if session.failed else session.method.memory
        with session.guarded(Reason.ENGINES, "rollout statistics"):
            stats = expect_instance(await self._reach(self.link.stats(version)), RolloutStats, "stats")
            self.lags = self.lags or bool(stats.interrupted)
            session.rollout_end(stats)
            if memory is not None:
                with self.ledger.spending():
                    shared = await self._reach_rollouts(self.link.share_rollouts(session.config.memory_tokens))
                    memory.keep(expect_list(shared, Rollout, "share_rollouts"))
            await self._audit("rolled out")

    @property
    def running(self) -> bool:
        """Is a phase under way that ends before its log-probs are judged; only the rank with a link knows."""
        return self._running is not None and not self._overlaps

    def spans(self, told: bool = True) -> Spans:
        """What the engines have said of the text that they sampled (collective).

        Args:
            told: does the trainer know by which version its text was sampled; then, in a synchronous run, of this phase alone.
        """
        found: list[Span] = [FORGOTTEN]
        needed = self.lags or not told
        # else, behind a failure, in a phase without drafts, nobody needs it, and nobody waits for it
        if self.link is not None and (needed or self.speculating or not self.session.failed):
            with self.ledger.spending(), self.session.guarded(Reason.ENGINES, "what the engines say of their samples"):
                found = expect_list(run_blocking(self._reach(self.link.spans())), Span, "spans")
        with self.session.guarded(Reason.ENGINES, "what the engines say of their samples"):
            found = of_first(found)
            self._spans = self._spans if needed else Spans()
            self._spans.add(found, self.policy_version)
            return self._spans
        self._spans.complete = False
        return self._spans

    def witnesses(self) -> list[Witness]:
        """Log-probs of this phase that the engines kept aside, on the rank with a link; none on the others."""
        kept: list[Witness] = []
        if self.link is not None:
            with self.ledger.spending(), self.session.guarded(Reason.ENGINES, "log-probs that the engines kept"):
                kept = expect_list(run_blocking(self._reach(self.link.witnesses())), Witness, "witnesses")
        return kept

    def train_draft(self, step: int) -> None:
        """One slice of draft training, bounded to ``train_share`` of the whole step, and a head start (collective)."""
        session = self.session
        wanted = 0.0 if session.hidden else session.head_start()
        self.agree()  # behind it: who failed there takes no part in the slice
        head_start = 0.0
        with session.guarded(Reason.TRAINING, "head start"):
            head_start = most_of_any_rank(wanted)
        step_seconds, share = self._slices.step_seconds(), session.config.train_share
        with self.ledger.spending():
            if not session.hidden:
                session.train_draft(step, share / (1.0 - share) * step_seconds + head_start)
        self._slices.restart()
        self.ledger.close()
        self.ledger.waits()

    async def _audit(self, moment: str) -> None:
        if not self.session.config.audit or self.link is None or (self._sleeps and moment == "rolled out"):
            return
        with self.session.guarded(Reason.OTHER_TROUBLE, "audit"):
            state = expect_instance(await self._reach(self.link.state(moment)), EngineState, "state")
            for auditor in self.session.auditors:
                auditor(state)
