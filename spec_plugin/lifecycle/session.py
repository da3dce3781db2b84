"""SpecSession: one in the actor's process and one in the engine's; it fires the plugins' hooks and holds law 6 around them."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from draft_training import OtherRankFailed
from spec_plugin.api.answers import expect_instance, finite_float, is_cancelled, type_and_value
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import pass_on
from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    HiddenStates,
    LogprobBatch,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StatedLogprobs,
    TargetInfo,
    WeightSync,
)
from spec_plugin.api.speculation import Reason, in_force, table_metrics
from spec_plugin.lifecycle.ledger import Ledger
from spec_plugin.lifecycle.manager import call_each, create_manager, method_of
from spec_plugin.lifecycle.plugin_metrics import PluginMetrics
from spec_plugin.lifecycle.recovery import Recovery

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
#: nats; a mean difference that no two models of one vocabulary reach by accident: a tolerance beyond it compares nothing
_NO_TOLERANCE = 10.0


class SpecSession:
    """Fires the hooks in lifecycle order for one process of the trainer.

    A failure in draft work turns speculation off, with one warning and the metric ``spec/failed``, until a fresh start
    (``spec.recoveries``); configuration, losslessness and provenance errors pass through and stop the run.
    """

    def __init__(self, config: SpecConfig, target: TargetInfo, manager: pluggy.PluginManager | None = None) -> None:
        """Create the plugins and let them validate.

        Args:
            config: the parsed options.
            target: what is known of the target and its engine.
            manager: for tests and embedders; by default built-ins and entry points, less ``config.block``.

        Raises:
            SpecConfigError: if a plugin refuses this run, or none knows ``config.method``.
        """
        self.config, self.target = config, target
        self.manager = manager or create_manager(config.block, config.plugins)
        self.method = method_of(config, target, self.manager)
        self.failure: str | None = None
        self._trouble = Reason.OTHER_TROUBLE  # in what work it has failed
        self._recovery = Recovery(config.recoveries)
        self.ledger = Ledger()
        #: do rollouts end behind the trainer's own work, so that drafts would save nothing; on every rank after ``agree``
        self.hidden = False
        #: can no draft come to pay: by the controller, on the rank that asks it; and on every rank after ``agree``
        self.no_outlook = self.hopeless = False
        self.recovering = False  # in the plain phase of a fresh start, until the next weight sync
        self.follows = False  # has speculation failed here only because it failed on another rank
        self.engines: EngineSchedule | None = None  # what they have confirmed; None: nobody asked for any
        #: what a guard raises in the check in progress; the conformance kit takes back what it has planted itself
        self.refused: BaseException | None = None
        self.auditors: list[Callable[[EngineState], None]] = []  # of the conformance kit; a run has none
        self._noted: set[tuple[str, type]] = set()  # harmless trouble that a warning has named
        self._numbers = PluginMetrics(self.manager, self.guarded)
        self._recoveries = 0
        self._unproven = 0  # checks of the last self-test
        #: the last step whose log-probs were judged, and the sequences that they were chosen from
        self._judged = (-1, 0), 0
        if self.method.why:
            logger.info("spec-plugin: spec.method=%s is %s: %s", config.method, self.method.name, self.method.why)
        self._configure()

    def _configure(self) -> None:
        self.manager.hook.spec_configure(config=self.config, target=self.target, method=self.method)

    @property
    def failed(self) -> bool:
        """True while draft trouble has turned speculation off."""
        return self.failure is not None

    @property
    def speculating(self) -> bool:
        """Do the engines draft in the phase; ranks without a link know it after ``SpecRun.agree``."""
        return self.engines is not None and self.engines.drafting

    @property
    def judged_together(self) -> int:
        """Sequences of the last step among which those lie that are judged together; 0: nothing was judged yet."""
        return self._judged[1]

    @property
    def unguarded(self) -> str:
        """Why log-probs are not compared before they enter the loss (law 3); empty when they are."""
        if not self.manager.has_plugin("provenance"):
            return "the plugin provenance is blocked"
        tolerance = self.config.logprob_tolerance or 0.0
        return f"spec.logprob_tolerance={tolerance:g}" if tolerance > _NO_TOLERANCE else ""

    @contextmanager
    def guarded(self, reason: Reason, doing: str = "", harmless: bool = False) -> Iterator[None]:
        """Draft work: what fails in this block turns speculation off, and the run goes on behind it (law 6).

        Args:
            reason: why the run is off after a failure in it, as ``spec/reason`` says.
            doing: what the block does, for the warning; empty: as the reason is called.
            harmless: no draft depends on it, and trouble is a warning.

        Raises:
            BaseException: what must stop the run, see ``fail``; and whatever is no ``Exception``, at once, such as the
                cancellation of the work that this block is part of.
        """
        failed = self._note if harmless else self.fail
        try:
            yield
        except CancelledError as error:
            if is_cancelled():
                raise
            failed(reason, error, doing=doing)  # what somebody else has cancelled is an answer that does not come
        except Exception as error:  # law 6
            failed(reason, error, doing=doing)

    def _note(self, reason: Reason, error: BaseException, doing: str) -> None:
        """In place of ``fail``, of bookkeeping that no draft depends on: one warning, and drafts go on."""
        pass_on(error)
        doing = doing or reason.work
        if (doing, type(error)) not in self._noted:
            self._noted.add((doing, type(error)))
            logger.warning("spec-plugin: %s: %s. Drafts go on", doing, _message_of(error), exc_info=error)

    def fail(
        self, reason: Reason, error: BaseException | str, for_good: bool = False, doing: str = "", soon: bool = False
    ) -> None:
        """Turn speculation off; only the first call warns, and only where the trouble is.

        Args:
            reason: what ``spec/reason`` says from here on.
            error: what was wrong.
            for_good: trying again would not help.
            doing: in what, for the warning; empty: as the reason is called.
            soon: nothing was wrong but the time, see ``Recovery.failed``.

        Raises:
            BaseException: if this error, or one that it was raised for, must stop the run, see ``stops_the_run``.
        """
        if isinstance(error, BaseException):
            pass_on(error)
        if isinstance(error, OtherRankFailed):
            self.follow(str(error))
        elif self.failure is None or self.follows:
            self.failure, self.follows = f"{doing or reason.work}: {_message_of(error)}", False
            self._trouble = reason
            exc = error if isinstance(error, BaseException) else None
            self._recovery.failed(for_good, soon)
            left = self._recovery.left
            logger.warning(
                "spec-plugin: speculation is off from here on, training goes on without drafts. Cause: %s. %s",
                *(
                    self.failure,
                    f"Weight syncs until it is tried again: {left}" if left else "Not tried again in this run",
                ),
                exc_info=exc,
            )
        if for_good and not isinstance(error, OtherRankFailed):
            self._recovery.failed(for_good)

    def try_again(self) -> bool:
        """At a weight sync: is it time for a fresh start, of what failed on this rank; then nothing has failed any more."""
        if self.failure is None or self.follows or not self._recovery.synced():
            return False
        logger.warning(
            "spec-plugin: drafts are tried again (%d of %d times, spec.recoveries): first a rollout without drafts, then a "
            "refresh and the self-test. They were off because of %s",
            *(self._recovery.begun, self.config.recoveries, self.failure),
        )
        self.failure = None
        return True

    def recover(self) -> None:
        """All ranks have agreed to begin anew (on every rank)."""
        self._recoveries += 1
        self.recovering, self.no_outlook = True, False
        with self.guarded(Reason.OTHER_TROUBLE, "recover"):
            self.manager.hook.spec_recover()

    def follow(self, failure: str | None) -> None:
        """Turn speculation off while it has failed on another rank, and on again with it.

        Args:
            failure: of another rank; None: none has failed.
        """
        if self.failure is None or self.follows:
            self.failure, self.follows, self._trouble = failure, failure is not None, Reason.OTHER_RANK

    def engine_ready(self, report: SelfTestReport) -> None:
        """The self-test passed; hand its measurements on."""
        self._unproven = len(report.unproven)
        with self.guarded(Reason.SELF_TEST, "engine_ready"):
            self.manager.hook.spec_engine_ready(report=report)

    def rollout_start(self, policy_version: int) -> None:
        """Generation with this policy version may begin."""
        with self.guarded(Reason.ENGINES, "rollout_start"):
            self.manager.hook.spec_rollout_start(policy_version=policy_version)

    def target_forward(self, hidden: HiddenStates) -> None:
        """Hand harvested hidden states to the plugins; nothing happens after a failure."""
        self.ledger.spent(hidden.milliseconds / 1e3)
        if not self.failed:
            with self.guarded(Reason.HARVEST):
                self.manager.hook.spec_target_forward(hidden=hidden)

    def check_logprobs(self, batch: LogprobBatch, chosen_from: int | None = None) -> None:
        """Let the guards look at log-probs before they enter the loss.

        Args:
            batch: what is about to enter it.
            chosen_from: where only some sequences of a step are recomputed, from how many they were chosen.

        Raises:
            LogprobProvenanceError: naming the first sequences, positions and values.
        """
        step = batch.policy_version, batch.ahead
        before = self._judged[1] if self._judged[0] == step else 0
        self._judged = step, before + (len(batch.mask) if chosen_from is None else chosen_from)
        self._check("spec_check_logprobs", batch)

    def _check(self, hook: str, batch: LogprobBatch | StatedLogprobs) -> None:
        """Ask the guards; what any of them raises is raised, whatever a plugin around them has made of it (law 3)."""
        self.refused = None

        def each(_: str, check: Callable[[], object]) -> object:
            try:
                return check()
            except BaseException as error:
                self.refused = error
                raise

        try:
            call_each(self.manager, hook, each, batch=batch)
            if self.refused is not None:
                raise self.refused
        finally:
            self.refused = None  # its traceback holds the batch

    def check_stated(self, batch: StatedLogprobs) -> None:
        """Let the guards look at log-probs that enter the loss as the engine stated them, and that nobody recomputes.

        Raises:
            LogprobProvenanceError: naming the first sequences, positions and values.
        """
        self._check("spec_check_stated", batch)

    @property
    def plain_for(self) -> Reason | None:
        """Why the coming rollout is plain whatever the controller would choose; None where it chooses."""
        if self.recovering:
            return Reason.FRESH_START
        return Reason.NOT_WAITED_FOR if self.hidden else Reason.NO_OUTLOOK if self.hopeless else None

    @property
    def idle(self) -> bool:
        """Is there no draft work in this step, neither harvest nor training nor a refresh; on every rank after ``agree``."""
        return self.hidden or self.hopeless

    def rollout_end(self, stats: RolloutStats) -> None:
        """Generation of one step is complete: hand its counters to the plugins, and enter what it has earned."""
        with self.guarded(Reason.ENGINES, "rollout_end"):
            self.manager.hook.spec_rollout_end(stats=stats)
        engines = stats.parts or (stats,)  # each has a tail of its own, and the slowest is waited for
        slowdown = self._slowdown(max(engines, key=lambda engine: engine.busy_seconds))
        with self.guarded(Reason.SCHEDULE, "what drafts have saved"):
            self.ledger.rolled_out(stats, slowdown)
        self.no_outlook = False
        if not self.failed:
            with self.guarded(Reason.SCHEDULE, "whether drafts can pay"):
                answer = self.manager.hook.spec_can_pay()
                self.no_outlook = answer is not None and not expect_instance(answer, bool, "spec_can_pay")

    def _slowdown(self, stats: RolloutStats) -> float | None:
        """How many times as long an engine's steps would have taken without drafts; None where no plugin knows."""
        hook, answer = self.manager.hook.spec_slowdown_without_drafts, None
        if not self.failed:
            with self.guarded(Reason.SCHEDULE, "what drafts have saved"):
                answer = hook(stats=stats)
        number = finite_float(answer)
        if number is not None and number > 0.0:
            return number
        if answer is not None:
            self._numbers.leave_out(f"the answer to {hook.name}", "spec/saved_s", answer, "no positive number")
        return None

    def head_start(self) -> float:
        """Seconds that the coming slice may take beyond its share, of a plugin that grants any; 0 after a failure."""
        granted = 0.0
        if not self.failed:
            with self.guarded(Reason.TRAINING, "head start"):
                answer = self.manager.hook.spec_head_start()
                seconds = 0.0 if answer is None else finite_float(answer)
                if seconds is None:
                    raise TypeError(f"spec_head_start returned {type_and_value(answer)}; expected a number of seconds")
                granted = max(0.0, seconds)
        return granted

    def train_draft(self, step: int, seconds: float) -> None:
        """Run one slice of draft training of at most ``seconds``."""
        if not self.failed:
            with self.guarded(Reason.TRAINING, "draft training"):
                self.manager.hook.spec_train_draft(step=step, seconds=seconds)

    def weight_sync(self, event: WeightSync) -> DraftRefresh | None:
        """Announce new target weights; returns the draft weights to install, or None to keep the old ones."""
        refresh: DraftRefresh | None = None
        if not self.failed:
            with self.guarded(Reason.REFRESH, "weight sync"):
                self.manager.hook.spec_weight_sync(event=event)
                # engines that sleep at level 2 have lost theirs
                if not self.idle or self.config.sleep_level > 1:
                    answer = self.manager.hook.spec_draft_weights(event=event)
                    refresh = None if answer is None else expect_instance(answer, DraftRefresh, "spec_draft_weights")
        return refresh

    def schedule(self, policy_version: int) -> Schedule | None:
        """k per batch size for the coming rollout phase; all zero after a failure."""
        chosen: Schedule | None = None
        with self.guarded(Reason.SCHEDULE):
            answer = self.manager.hook.spec_schedule(policy_version=policy_version)
            chosen = None if answer is None else self._fitting(expect_instance(answer, Schedule, "spec_schedule"))
        return self.plain_schedule if self.failed else chosen

    @property
    def plain_schedule(self) -> Schedule:
        """k = 0 at all ``max_num_seqs + 1`` batch sizes."""
        return Schedule((0,) * (self.target.max_num_seqs + 1))

    def _fitting(self, schedule: Schedule) -> Schedule:
        """An engine that refuses a table goes on with the one that it has, so a wrong one is not sent at all."""
        length, table = self.target.max_num_seqs + 1, schedule.table
        if len(table) != length or any(type(k) is not int or not 0 <= k <= self.config.k for k in table):
            raise ValueError(
                f"spec_schedule returned the table {type_and_value(table)}; expected {length} ints of 0 to "
                f"spec.k={self.config.k}, one for each batch size from 0 to max_num_seqs"
            )
        return schedule

    def metrics(self) -> dict[str, float]:
        """All plugins' metrics merged, plus ``spec/failed`` and what the engines really do."""
        merged = self._numbers.merged()
        for_good = self.failed and not self.follows and self._recovery.left is None
        trouble = self._trouble if self.failed else None
        if self.engines is not None:
            merged |= self._numbers.finite("the engines", table_metrics(self.engines))
        merged |= self._numbers.finite("the ledger", self.ledger.metrics())
        if self.plain_for is not None:  # the controller was not asked, and says what it last predicted
            merged.pop("spec/speedup_predicted", None)
        merged |= in_force(merged.get("spec/state"), self.engines, self.plain_for, trouble, for_good)
        merged["spec/failed"] = float(self.failed)
        merged["spec/recoveries"] = float(self._recoveries)
        merged["spec/unproven"] = float(self._unproven)
        merged["spec/provenance"] = float(not self.unguarded)
        return merged

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """For ``WeightSync``: a copy of one of the policy's tensors, in the engine's dtype.

        Returns:
            None, and no more speculation, where it cannot be made; for want of memory, say.
        """
        import torch  # late: whoever asks for nothing but the options need not wait for it

        copy: Tensor | None = None
        with self.guarded(Reason.REFRESH, "a copy of the policy's embedding or head"):
            copy = tensor.detach().to(getattr(torch, self.target.dtype), copy=True)
        return copy

    def save(self, path: Path) -> None:
        """Save every plugin's state under ``path``, each by itself; after a failure of draft work nothing is saved."""

        def each(plugin: str, save: Callable[[], object]) -> object:
            with self.guarded(Reason.CHECKPOINT, f"save of plugin {plugin} in {path}", harmless=True):
                save()
            return None

        if not self.failed:
            with self.guarded(Reason.CHECKPOINT, f"save in {path}, in a wrapper", harmless=True):
                call_each(self.manager, "spec_save", each, path=path)

    def load(self, path: Path) -> None:
        """Restore every plugin's state from what ``save`` wrote; ``path`` may be missing."""
        with self.guarded(Reason.CHECKPOINT, "load"):
            self.manager.hook.spec_load(path=path)


def _message_of(error: BaseException | str) -> str:
    """Its message, or its type where it has none that can be printed."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # of its own __str__
        return type(error).__name__
