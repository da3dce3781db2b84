"""Makes a NaN a number before the guard sees it, on both sides."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "planted_errors_reach_the_guard"
ONLY = True


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        assert batch.rollout is not None
        return replace(batch, rollout=batch.rollout.nan_to_num(0.0), recomputed=batch.recomputed.nan_to_num(0.0))


class Driver(driver.Driver):
    adapter = "wrong_adapters.nan_cleaned_away:Adapter"
