"""Shows the guard the first micro-batch of each step, and trains on all of them."""

from __future__ import annotations

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        return batch.of(torch.arange(len(batch.mask) // 2))


class Driver(driver.Driver):
    adapter = "wrong_adapters.first_micro_batch_checked:Adapter"
