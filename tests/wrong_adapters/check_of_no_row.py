"""Checks a batch without rows in every step but the first."""

from __future__ import annotations

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.adapter import Responses

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        if not self.step:
            return super().check(rollouts, recomputed)
        none = torch.zeros(0, 0)
        self.spec.check(Responses([], [], none.bool(), none, (torch.zeros(0).long(),) * 2), none)


class Driver(driver.Driver):
    adapter = "wrong_adapters.check_of_no_row:Adapter"
