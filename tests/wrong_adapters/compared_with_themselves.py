"""Shows the guard the recomputed log-probs twice: they always agree."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.events import LogprobBatch

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> LogprobBatch:
        return replace(super().batch(rollouts, recomputed), rollout=recomputed.clone())


class Driver(driver.Driver):
    adapter = "wrong_adapters.compared_with_themselves:Adapter"
