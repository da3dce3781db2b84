"""Shows the guard the first micro-batch of each step, and trains on all of them."""

from __future__ import annotations

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.events import LogprobBatch

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> LogprobBatch:
        return super().batch(rollouts, recomputed).of(torch.arange(len(recomputed) // 2))


class Driver(driver.Driver):
    adapter = "wrong_adapters.first_micro_batch_checked:Adapter"
