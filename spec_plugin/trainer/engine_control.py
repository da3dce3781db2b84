"""EngineControl: what the actor's first rank asks of the engines around each rollout phase, each call guarded and in time."""

from __future__ import annotations

import asyncio
import logging
import operator
import re
import time
from collections.abc import Awaitable
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
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.rollouts import CHUNK_TOKENS, Rollout
from spec_plugin.api.spans import FORGOTTEN, Span
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.links import EngineLink

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NAMES = {
    SelfTestPart.ALL: "the self-test",
    SelfTestPart.START: "the self-test's first part (nothing is drafted yet; the rest comes before a draft is served)",
    SelfTestPart.DRAFTS: "the self-test's second part (a trained draft is about to be served: its samples, and switching)",
}

#: times ``refresh_timeout_s`` after which a call is given up; a link's own limits come before (a refresh is two calls)
_PATIENCE = 3
#: seconds for which a self-test may be late beside that
_START = 300.0
#: so often the next self-test gets twice the time of one that ran out of it
_TWICE = 2
#: different reasons of refused refreshes that are said; what makes each one different from all others is not worth a line
_REASONS = 20


class EngineControl:
    """Refresh, self-test, schedule and counters of all engines of a run. Only the rank that has the link to them has one."""

    def __init__(self, session: SpecSession, link: EngineLink, sleeps: bool) -> None:
        """Bind to engines that run, or will run.

        Args:
            session: of this process.
            link: to all engines of the run.
            sleeps: may the engines have no weights in memory when a phase ends.
        """
        self.session, self.link, self._sleeps = session, link, sleeps
        self.running: int | None = None  # policy version of the phase in progress
        self._tested: int | None = None  # draft version of the last self-test
        self._drafts_tested = False  # was it more than the part that begins a run
        self._late = 0  # self-tests that ran out of time
        self._recalled = False  # do the engines know what a run before this one has sampled
        self._installed = -1  # draft version that the engines serve
        self._anew = False  # was nothing sent to the engines since a fresh start
        self._warned: set[str] = set()  # what is said once
        if session.unguarded:
            logger.warning(
                "spec-plugin: %s: log-probs enter the loss without a check that they are the policy's (law 3)",
                session.unguarded,
            )
        if not session.config.self_test:
            logger.warning(
                "spec-plugin: spec.self_test=False: the engines are not tested, so one that does not sample from the policy "
                "goes unnoticed (law 2)"
            )

    async def _reach(self, call: Awaitable[T], seconds: float = 0.0) -> T:
        """An answer of the engines, in time: a link may have forgotten its own limit, and nothing may wait for ever."""
        return await asyncio.wait_for(call, _PATIENCE * self.session.config.refresh_timeout_s + seconds)

    async def _reach_rollouts(self, call: Awaitable[T]) -> T:
        """An answer to a call that hands rollouts on in several chunks, each of which the link gives its own time."""
        config = self.session.config
        return await self._reach(call, 2 * (config.memory_tokens // CHUNK_TOKENS) * config.refresh_timeout_s)

    # ---- at a weight sync

    async def install(self, refresh: DraftRefresh | None, fresh_start: bool) -> None:
        """Have every engine install this draft; None: they go on with the one that they have.

        Args:
            refresh: what ``spec_draft_weights`` has given for the weights that the engines have now.
            fresh_start: is the plain phase over with which a fresh start begins.
        """
        session, draft = self.session, self.session.method.draft
        if fresh_start:  # what is not sent now is tested when it is first served
            self._drafts_tested = False
            self._tested, self._anew = 0 if refresh is None and draft is not None else None, True
        # what the engines served before may be gone; a method without a draft of ours has nothing to lose
        dropped = session.config.sleep_level > 1 and draft is not None
        if refresh is None:
            if dropped and not session.failed:
                session.fail(Reason.REFRESH, RuntimeError("no draft was sent to engines that had dropped theirs"))
            return
        began = time.perf_counter()
        with session.guarded(Reason.REFRESH):
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
            report = replace(report, milliseconds=(time.perf_counter() - began) * 1e3)
            session.manager.hook.spec_refreshed(refresh=refresh, report=report)
            await self.audit("refreshed")

    def _warn_refused(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        kind = re.sub(r"[0-9a-f]{8,}|\d+", "…", report.reason)
        if len(self._warned) < _REASONS:
            self._warn_once(
                "spec-plugin: the engines refused draft version %s and go on with version %s: %s. Further refusals for this "
                "reason are only counted, in spec/refresh_refused",
                *(refresh.draft_version, report.draft_version, report.reason or "they gave no reason"),
                kind=kind,
            )

    def _warn_once(self, text: str, *values: object, kind: str = "") -> None:
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            logger.warning(text, *values)

    # ---- before the rollouts

    async def begin(self, policy_version: int, control_share: float | None) -> None:
        """Self-test, of drafts before one is served, and once more before a trained one first is; then set k.

        Args:
            policy_version: that the rollouts sample.
            control_share: of the requests in the control group; None: ``spec.control_share``.

        Raises:
            LosslessError: if an engine does not sample from the target.
        """
        session = self.session
        if self._tested is None:
            begins = session.method.newborn and session.config.serve != "always" and self._installed <= 0
            await self._self_test(SelfTestPart.START if begins else SelfTestPart.ALL)
        if not self._recalled and not session.failed:
            await self._recall()
        plain = session.plain_for is not None
        schedule = session.plain_schedule if plain else session.schedule(policy_version)
        learnt = self._tested == 0 < self._installed
        if schedule is not None and any(schedule.table) and (learnt or not self._drafts_tested):
            # an untrained draft is never right, so only now can the sampler's accepting half be seen at work
            await self._self_test(SelfTestPart.DRAFTS)
            schedule = session.schedule(policy_version)
        await self._set(schedule, control_share)
        failed_before = session.failed
        with session.guarded(Reason.SCHEDULE, "the beginning of a phase"):
            await self._reach(self.link.start_phase(policy_version))
        await self.audit("rollout")
        session.rollout_start(policy_version)
        if session.failed and not failed_before and session.speculating:
            await self._set(session.plain_schedule, control_share)
        self.running = policy_version

    async def _set(self, schedule: Schedule | None, control_share: float | None) -> None:
        """Set k, and know what the engines do: where they do not confirm drafts they are asked for none.

        If that is not confirmed either, what they sample counts as drafted (law 3).
        """
        session, plain = self.session, self.session.plain_schedule
        tables = [] if schedule is None else [schedule, plain] if any(schedule.table) else [plain]
        for wanted in tables:
            session.engines = EngineSchedule()  # one of several may have taken it before the others failed
            with session.guarded(Reason.SCHEDULE):
                wanted = replace(wanted, control_share=control_share)
                session.engines = expect_instance(
                    await self._reach(self.link.set_schedule(wanted)), EngineSchedule, "set_schedule"
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
        elif session.failed and session.speculating:
            self._warn_once(
                "spec-plugin: the engines were told to stop drafting, and have not confirmed that they did. Until they do, "
                "what they sample is checked as drafted text; they are asked again before each rollout"
            )

    async def _recall(self) -> None:
        """What a run before this one has sampled."""
        self._recalled = True
        if (memory := self.session.method.memory) is not None:
            with self.session.guarded(Reason.ENGINES, "recall"):
                if rollouts := expect_list(memory.recall(), Rollout, "recall"):
                    await self._reach_rollouts(self.link.remember(rollouts))

    async def _self_test(self, part: SelfTestPart) -> None:
        """Test the engines; nothing is found wrong where they do not answer, and nothing is proven.

        Raises:
            LosslessError: if they were found not to sample from the target.
        """
        session = self.session
        self._tested, self._drafts_tested = max(0, self._installed), part is not SelfTestPart.START
        if not session.config.self_test or session.failed:
            return
        seconds = session.config.self_test_seconds * 2 ** min(self._late, _TWICE)
        logger.info(
            "spec-plugin: %s begins, no rollout until it ends: %.0f s (spec.self_test_seconds), up to four times that where less "
            "would prove nothing",
            *(_NAMES[part], seconds * part.share),
        )
        with session.ledger.spending(), session.guarded(Reason.SELF_TEST):
            answer = await self._reach(self.link.self_test(seconds, part), 5 * seconds + _START)
            self._judge(expect_instance(answer, SelfTestReport, "self_test"), part)

    def _judge(self, report: SelfTestReport, part: SelfTestPart) -> None:
        session = self.session
        if report.passed:
            lines = "".join(f"\n  {check.name}: {check.detail}" for check in report.checks)
            logger.info("spec-plugin: %s passed in %.1f s%s", _NAMES[part], report.seconds, lines)
            for check in report.unproven:
                logger.warning(
                    "spec-plugin: the self-test found nothing wrong, but %s is %s. More seconds may prove it "
                    "(spec.self_test_seconds=%g)",
                    *(check.name, check.detail, session.config.self_test_seconds),
                )
            session.engine_ready(report)
            return
        if report.out_of_time:
            self._late += 1
            session.fail(Reason.SELF_TEST, _late(report, session.config.self_test_seconds), soon=True)
            return
        message = (
            f"the start-up self-test failed after {report.seconds:.1f} s, speculation is not used:\n{report.failures()}\n"
            "`spec-plugin doctor` shows which patches and capabilities this engine has"
        )
        if session.config.on_self_test_failure == "raise":
            raise LosslessError(message)
        session.fail(Reason.SELF_TEST, message, for_good=True)

    # ---- behind the rollouts

    async def end_phase(self) -> bool:
        """Collect what the engines did in the phase, once; were requests in it cut short, to go on under the next policy."""
        if self.running is None:
            return False
        version, self.running = self.running, None
        session, cut_short = self.session, False
        memory = None if session.failed else session.method.memory
        with session.guarded(Reason.ENGINES, "rollout statistics"):
            stats = expect_instance(await self._reach(self.link.stats(version)), RolloutStats, "stats")
            cut_short = bool(stats.interrupted)
            session.rollout_end(stats)
            if memory is not None:
                with session.ledger.spending():
                    shared = await self._reach_rollouts(self.link.share_rollouts(session.config.memory_tokens))
                    memory.keep(expect_list(shared, Rollout, "share_rollouts"))
            if not self._sleeps:
                await self.audit("rolled out")
        return cut_short

    async def spans(self) -> list[Span]:
        """What the engines sampled since the last call; ``FORGOTTEN`` alone where they do not say it."""
        found = [FORGOTTEN]
        with (
            self.session.ledger.spending(),
            self.session.guarded(Reason.ENGINES, "what the engines say of their samples"),
        ):
            found = expect_list(await self._reach(self.link.spans()), Span, "spans")
        return found

    async def audit(self, moment: str) -> None:
        """With ``spec.audit``: ask the engines what they hold, at a moment that ``EngineState`` names."""
        if not self.session.config.audit:
            return
        with self.session.guarded(Reason.OTHER_TROUBLE, "audit"):
            state = expect_instance(await self._reach(self.link.state(moment)), EngineState, "state")
            for auditor in self.session.auditors:
                auditor(state)


def _late(report: SelfTestReport, seconds: float) -> str:
    """What is said of a self-test that ran out of time."""
    passed = ", ".join(check.name for check in report.checks if check.passed) or "nothing"
    return (
        f"nothing was found wrong, but the self-test ran out of time after {report.seconds:.0f} s: the engine is slow, or the "
        f"machine busy with other work. Passed: {passed}. Not finished:\n{report.failures()}\nLater ones get twice the time, "
        f"then four times; spec.self_test_seconds={seconds:g} sets it, of which a test takes up to four times"
    )
