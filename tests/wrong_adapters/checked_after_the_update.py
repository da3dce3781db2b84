"""Checks the log-probs when the policy has been updated with them."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Trainer
from torch import Tensor

CAUGHT_BY = "logprobs_are_checked_before_they_are_used"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        pass

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        loss = Trainer.update(self, rollouts, old, advantages)
        super().check(rollouts, old)
        self.spec.policy_updated(self.step)
        return loss


class Driver(driver.Driver):
    adapter = "wrong_adapters.checked_after_the_update:Adapter"
