"""Its mask, made for the next token, leaves out each response's last one."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        lengths = batch.mask.sum(-1, keepdim=True)
        return replace(batch, mask=batch.mask & (batch.mask.cumsum(-1) < lengths))

    def documents(self, rollouts: Rollouts) -> tuple[list[Tensor], list[Tensor]]:
        documents, masks = super().documents(rollouts)
        return [d[:-1] for d in documents], [m[:-1] for m in masks]


class Driver(driver.Driver):
    adapter = "wrong_adapters.last_token_unchecked:Adapter"
