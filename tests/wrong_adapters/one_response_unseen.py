"""One response of each batch is never shown to the guard."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        mask = batch.mask.clone()
        mask[-1] = False
        return replace(batch, mask=mask)


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_response_unseen:Adapter"
