"""Opens the harvest in each of four micro-batches: four budgets a step."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

CAUGHT_BY = "hooks_fire_in_order"
ONLY = True


class Adapter(MinimalAdapter):
    def documents(self, rollouts: Rollouts) -> tuple[list[Tensor], list[Tensor]]:
        found = super().documents(rollouts)
        for _ in range(3):
            self.spec.harvest.open()
        return found


class Driver(driver.Driver):
    adapter = "wrong_adapters.a_budget_for_each_micro_batch:Adapter"
