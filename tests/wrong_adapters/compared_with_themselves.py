"""Shows the guard the recomputed log-probs twice: they always agree."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        return replace(batch, rollout=batch.recomputed.clone())


class Driver(driver.Driver):
    adapter = "wrong_adapters.compared_with_themselves:Adapter"
