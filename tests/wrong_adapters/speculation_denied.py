"""Says of every batch that it was sampled without drafts: the guard then only warns."""

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
        return replace(super().batch(rollouts, recomputed), speculating=False)


class Driver(driver.Driver):
    adapter = "wrong_adapters.speculation_denied:Adapter"
