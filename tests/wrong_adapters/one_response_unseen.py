"""One response of each batch is never shown to the guard."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin import events

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> events.LogprobBatch:
        found = super().batch(rollouts, recomputed)
        mask = found.mask.clone()
        mask[-1] = False
        return replace(found, mask=mask)


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_response_unseen:Adapter"
