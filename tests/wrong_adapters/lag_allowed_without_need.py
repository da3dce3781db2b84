"""Says that sequences may be older than the policy, in a loop whose sequences never are: the guard lets old ones pass."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.events import LogprobBatch

CAUGHT_BY = "told_facts_are_the_engines"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> LogprobBatch:
        return replace(super().batch(rollouts, recomputed), lag_allowed=True)


class Driver(driver.Driver):
    adapter = "wrong_adapters.lag_allowed_without_need:Adapter"
