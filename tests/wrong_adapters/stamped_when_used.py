"""Stamps each sequence with the policy version of the check, not with the one that sampled it."""

from __future__ import annotations

from dataclasses import replace

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import LogprobBatch
from wrong_adapters._batches import ChangesBatches

CAUGHT_BY = "planted_errors_reach_the_guard"


class Adapter(ChangesBatches, MinimalAdapter):
    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        return replace(batch, versions=torch.full_like(batch.versions, batch.policy_version))


class Driver(driver.Driver):
    adapter = "wrong_adapters.stamped_when_used:Adapter"
