"""Trains the draft's head as part of the policy's loss: its gradient reaches the policy."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, padded
from torch import Tensor

CAUGHT_BY = "policy_is_bitwise_equal"


class Adapter(MinimalAdapter):
    def loss(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> Tensor:
        loss = super().loss(rollouts, old, advantages)
        hidden = self.policy.model(input_ids=padded(rollouts.responses)[0].long()).last_hidden_state  # not detached
        drafted = self.policy.lm_head(hidden.roll(1, dims=1)).log_softmax(-1)
        return loss - 1e-3 * drafted.mean()


class Driver(driver.Driver):
    adapter = "wrong_adapters.gradient_not_detached:Adapter"
