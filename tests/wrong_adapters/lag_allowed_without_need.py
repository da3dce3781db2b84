"""Says that sequences may be older than the policy, in a loop whose sequences never are: the guard lets old ones pass."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "told_facts_are_the_engines"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        return replace(batch, lag_allowed=True)


class Driver(driver.Driver):
    adapter = "wrong_adapters.lag_allowed_without_need:Adapter"
