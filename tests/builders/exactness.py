"""A toy policy, engines that sample from it or do not, and the exactness guard through their phases."""

from __future__ import annotations

from dataclasses import replace

import pluggy
import torch
from torch import Tensor

from builders.batches import batch_of
from builders.training import TARGET as TRAINED
from spec_plugin.api import hookspecs
from spec_plugin.api.events import ChosenStates, LogprobBatch, RolloutStats, TargetInfo, WeightSync
from spec_plugin.policy.exactness import ExactnessGuard

V, H = 96, 8
TARGET = replace(TRAINED, dtype="float32", sampling={"temperature": 1.0})


def guard_of(target: TargetInfo) -> ExactnessGuard:
    """A guard that was told of a run."""
    guard = ExactnessGuard()
    guard.spec_configure(target)
    return guard


def synced(guard: ExactnessGuard, event: WeightSync, *others: object) -> None:
    """A weight sync of a run with few other plugins."""
    manager = pluggy.PluginManager("spec_plugin")
    manager.add_hookspecs(hookspecs)
    for plugin in (guard, *others):
        manager.register(plugin)
    manager.hook.spec_weight_sync(event=event)


def states_of(last: Tensor, tokens: Tensor, passed: int = 0, chosen: int = 0) -> ChosenStates:
    """Of one row, all of whose tokens were chosen."""
    n = len(tokens)
    return ChosenStates(torch.zeros(n, dtype=torch.int64), torch.arange(n), tokens.long(), last, passed, chosen, False)


class Run:
    """Phases of one row, each token of which is drawn anew, by an engine of some temperature whose policy has temperature 1.

    Args:
        temperature: of the engine.
        states_policy: does the engine state the policy's log-probs, and not its own.
        tokens: of a phase.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        states_policy: bool = False,
        tokens: int = 200,
        target: TargetInfo = TARGET,
    ) -> None:
        self.guard, self.tokens = guard_of(target), tokens
        self._temperature, self._states_policy = temperature, states_policy
        self._stream = torch.Generator().manual_seed(0)
        self.head = torch.randn(V, H, generator=self._stream)
        self.version = 0
        self.sync(0)

    def sync(self, version: int) -> None:
        self.version = version
        synced(self.guard, WeightSync(version, None, self.head))

    def batch(self, version: int | None = None, passed: int | None = None, chosen: int | None = None) -> LogprobBatch:
        last = torch.randn(self.tokens, H, generator=self._stream)
        logits = last @ self.head.T
        tokens = (logits / self._temperature).softmax(-1).multinomial(1, generator=self._stream)
        recomputed = logits.log_softmax(-1).gather(1, tokens).T
        sampled = (logits / self._temperature).log_softmax(-1).gather(1, tokens).T
        stated = recomputed if self._states_policy else sampled
        batch = batch_of(self.version if version is None else version, recomputed, stated)
        counts = (self.tokens if n is None else n for n in (passed, chosen))
        return replace(batch, states=states_of(last, tokens.flatten(), *counts))

    def phase(self, batch: LogprobBatch) -> None:
        """A rollout whose batch this is, its check, and the weight sync behind it."""
        self.guard.spec_rollout_end(RolloutStats(self.version, 1, self.tokens, 1.0))
        self.guard.spec_check_logprobs(batch)
        self.sync(self.version + 1)

    def phases(self, count: int) -> None:
        for _ in range(count):
            self.phase(self.batch())

    def metrics(self) -> dict[str, float]:
        return self.guard.spec_metrics()
