"""Says of every token that it was sampled without a draft, of phases that draft: the guard judges none."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.events import LogprobBatch

CAUGHT_BY = "speculation_is_told_as_it_was"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> LogprobBatch:
        shown = super().batch(rollouts, recomputed)
        return replace(shown, plain=shown.mask)


class Driver(driver.Driver):
    adapter = "wrong_adapters.plain_claimed:Adapter"
