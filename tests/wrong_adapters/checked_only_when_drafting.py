"""Checks nothing in phases without drafts."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "logprobs_are_checked_before_they_are_used"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        return batch if batch.speculating else None


class Driver(driver.Driver):
    adapter = "wrong_adapters.checked_only_when_drafting:Adapter"
