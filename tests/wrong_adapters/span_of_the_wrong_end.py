"""Asynchronous: stamps every token with the version that sampled the last one."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "policy_versions_agree"


class Adapter(ChangesBatches, LaggingAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        last = batch.versions.masked_fill(~batch.mask, -1).amax(-1, keepdim=True)
        return replace(batch, versions=last.expand_as(batch.mask))


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.span_of_the_wrong_end:Adapter"
