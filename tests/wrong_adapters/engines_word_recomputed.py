"""Shows the guard the engine's log-probs twice, as the recomputed ones, too: they always agree."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.events import LogprobBatch

CAUGHT_BY = "planted_errors_reach_the_guard"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> LogprobBatch:
        shown = super().batch(rollouts, recomputed)
        assert shown.rollout is not None
        return replace(shown, recomputed=shown.rollout.clone())


class Driver(driver.Driver):
    adapter = "wrong_adapters.engines_word_recomputed:Adapter"
