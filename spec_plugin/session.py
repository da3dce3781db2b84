"""SpecSession: one per process, the only object that an adapter talks to; it fires the hooks and holds law 6."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from draft_training import OtherRankFailed
from spec_plugin.config import SpecConfig
from spec_plugin.errors import FATAL, SpecConfigError
from spec_plugin.events import (
    DraftRefresh,
    EngineState,
    HiddenStates,
    LogprobBatch,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    TargetInfo,
    WeightSync,
)
from spec_plugin.manager import create_manager
from spec_plugin.method import Method
from spec_plugin.rollouts import Rollout

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: every session of this process, for tools that look at it from inside (the conformance kit)
SESSIONS: weakref.WeakSet[SpecSession] = weakref.WeakSet()


class SpecSession:
    """Fires the hooks in lifecycle order for one process of the trainer.

    A failure in draft work turns speculation off for the rest of the run, with one warning and the metric
    ``spec/failed``; configuration, losslessness and provenance errors pass through and stop the run.
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
        self.follows = False  # has speculation failed here only because it failed on another rank
        if self.method.why:
            logger.info("spec-plugin: spec.method=%s is %s: %s", config.method, self.method.name, self.method.why)
        SESSIONS.add(self)
        self.manager.hook.spec_configure(config=config, target=target, method=self.method)

    @property
    def failed(self) -> bool:
        """True once draft trouble has turned speculation off for good."""
        return self.failure is not None

    @property
    def unguarded(self) -> str:
        """Why log-probs are not compared before they enter the loss (law 3); empty when they are."""
        if not self.manager.has_plugin("provenance"):
            return "the plugin provenance is blocked"
        return "spec.logprob_tolerance=inf" if self.config.logprob_tolerance == math.inf else ""

    def fail(self, where: str, error: BaseException | str) -> None:
        """Turn speculation off for the rest of the run; only the first call warns, and only where the trouble is."""
        if isinstance(error, OtherRankFailed):
            self.follow(str(error))
        elif self.failure is None or self.follows:
            self.failure, self.follows = f"{where}: {error}", False
            exc = error if isinstance(error, BaseException) else None
            logger.warning(
                "spec-plugin: speculation is off from here on, training goes on plain; %s", self.failure, exc_info=exc
            )

    def follow(self, failure: str | None) -> None:
        """What became of the other ranks: speculation is off here while it is off on one of them."""
        if self.failure is None or self.follows:
            self.failure, self.follows = failure, failure is not None

    def engine_ready(self, report: SelfTestReport) -> None:
        """The self-test passed; hand its measurements on."""
        self._guarded("engine_ready", lambda: self.manager.hook.spec_engine_ready(report=report))

    def rollout_start(self, policy_version: int) -> None:
        """Generation with this policy version may begin."""
        self._guarded("rollout_start", lambda: self.manager.hook.spec_rollout_start(policy_version=policy_version))

    def rollout_end(self, stats: RolloutStats) -> None:
        """Generation of one step is complete."""
        self._guarded("rollout_end", lambda: self.manager.hook.spec_rollout_end(stats=stats))

    def rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Hand on what the engines sampled, of a method that remembers."""
        self._guarded("rollouts", lambda: self.manager.hook.spec_rollouts(rollouts=rollouts))

    def recall(self) -> Sequence[Rollout]:
        """What engines that remember nothing are to be told."""
        found: Sequence[Rollout] | None = self._guarded("recall", lambda: self.manager.hook.spec_recall())
        return found or ()

    def target_forward(self, hidden: HiddenStates) -> None:
        """Hand harvested hidden states to the plugins; nothing happens after a failure."""
        if not self.failed:
            self._guarded("harvest", lambda: self.manager.hook.spec_target_forward(hidden=hidden))

    def check_logprobs(self, batch: LogprobBatch) -> None:
        """Let the guards look at log-probs before they enter the loss.

        Raises:
            LogprobProvenanceError: naming the first sequences, positions and values.
        """
        self.manager.hook.spec_check_logprobs(batch=batch)

    def head_start(self, step: int) -> float:
        """Seconds that the coming slice may take beyond its share; 0 after a failure."""
        fire = self.manager.hook.spec_head_start
        granted = None if self.failed else self._guarded("head start", lambda: fire(step=step))
        return 0.0 if granted is None else float(granted)

    def train_draft(self, step: int, seconds: float) -> None:
        """Run one slice of draft training of at most ``seconds``."""
        if not self.failed:
            self._guarded("draft training", lambda: self.manager.hook.spec_train_draft(step=step, seconds=seconds))

    def weight_sync(self, event: WeightSync) -> DraftRefresh | None:
        """Announce new target weights; returns the draft weights to install, or None to keep the old ones."""
        if self.failed:
            return None

        def fire() -> DraftRefresh | None:
            self.manager.hook.spec_weight_sync(event=event)
            refresh: DraftRefresh | None = self.manager.hook.spec_draft_weights(event=event)
            return refresh

        return self._guarded("weight sync", fire)

    def draft_weights(self, event: WeightSync) -> DraftRefresh | None:
        """Between two weight syncs: the draft weights to install, or None to keep the old ones."""
        if self.failed:
            return None
        fire = self.manager.hook.spec_draft_weights
        found: DraftRefresh | None = self._guarded("draft weights", lambda: fire(event=event))
        return found

    def refreshed(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        """Tell the plugins what became of a refresh."""
        self._guarded("refresh", lambda: self.manager.hook.spec_refreshed(refresh=refresh, report=report))

    def schedule(self, policy_version: int) -> Schedule | None:
        """k per batch size for the coming rollout phase; all zero after a failure."""
        fire = self.manager.hook.spec_schedule
        chosen: Schedule | None = self._guarded("schedule", lambda: fire(policy_version=policy_version))
        return Schedule((0,) * (self.target.max_num_seqs + 1)) if self.failed else chosen

    def audit(self, state: EngineState) -> None:
        """Tell the plugins what the engine holds."""
        self._guarded("audit", lambda: self.manager.hook.spec_audit(state=state))

    def metrics(self) -> dict[str, float]:
        """All plugins' metrics merged, plus ``spec/failed``."""
        merged: dict[str, float] = {}
        for implementation in reversed(self.manager.hook.spec_metrics.get_hookimpls()):
            # one by one: a plugin that fails must not silence the others
            function: Callable[[], Any] = implementation.function
            part = self._guarded(f"metrics of plugin {implementation.plugin_name}", function)
            merged.update({name: value for name, value in (part or {}).items() if math.isfinite(value)})
        merged["spec/failed"] = float(self.failed)
        merged["spec/provenance"] = float(not self.unguarded)
        return merged

    def save(self, path: Path) -> None:
        """Save every plugin's state under ``path``."""
        if not self.failed:
            self._guarded("save", lambda: self.manager.hook.spec_save(path=path))

    def load(self, path: Path) -> None:
        """Restore every plugin's state from ``path``."""
        self._guarded("load", lambda: self.manager.hook.spec_load(path=path))

    def _guarded(self, where: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except FATAL:
            raise
        except Exception as error:  # law 6: draft trouble never stops training
            self.fail(where, error)
            return None


def method_of(config: SpecConfig, target: TargetInfo, manager: pluggy.PluginManager) -> Method:
    """How the run drafts, from the first plugin that knows.

    Raises:
        SpecConfigError: if no plugin knows ``config.method``, or the one that does refuses this target.
    """
    found: Method | None = manager.hook.spec_method(config=config, target=target)
    if found is None:
        names = ", ".join(sorted(n for n, _ in manager.list_name_plugin()))
        raise SpecConfigError(f"spec.method={config.method!r}: no active plugin provides it; active plugins: {names}")
    return found
