"""Says of every token that it was sampled without a draft, of phases that draft: the guard judges none."""

from __future__ import annotations

from dataclasses import replace

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import Drafts, LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "speculation_is_told_as_it_was"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        return replace(batch, drafted=torch.full_like(batch.drafted, Drafts.CONTROL))


class Driver(driver.Driver):
    adapter = "wrong_adapters.plain_claimed:Adapter"
