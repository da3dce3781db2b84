"""Shows the guard the engine's log-probs twice, as the recomputed ones, too: they always agree."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "planted_errors_reach_the_guard"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        assert batch.rollout is not None
        return replace(batch, recomputed=batch.rollout.clone())


class Driver(driver.Driver):
    adapter = "wrong_adapters.engines_word_recomputed:Adapter"
