"""Makes a NaN a number before the guard sees it, on both sides."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin import events

CAUGHT_BY = "planted_errors_reach_the_guard"
ONLY = True


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> events.LogprobBatch:
        found = super().batch(rollouts, recomputed)
        assert found.rollout is not None
        return replace(found, rollout=found.rollout.nan_to_num(0.0), recomputed=found.recomputed.nan_to_num(0.0))


class Driver(driver.Driver):
    adapter = "wrong_adapters.nan_cleaned_away:Adapter"
