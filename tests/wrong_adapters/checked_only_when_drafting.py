"""Checks nothing in phases without drafts."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

CAUGHT_BY = "logprobs_are_checked_before_they_are_used"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        if self.control.speculating:
            super().check(rollouts, recomputed)


class Driver(driver.Driver):
    adapter = "wrong_adapters.checked_only_when_drafting:Adapter"
