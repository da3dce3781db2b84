"""Says of every batch that it was sampled with drafts: the guard never learns what plain text shows."""

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
        return replace(super().batch(rollouts, recomputed), speculating=True)


class Driver(driver.Driver):
    adapter = "wrong_adapters.speculation_claimed:Adapter"
