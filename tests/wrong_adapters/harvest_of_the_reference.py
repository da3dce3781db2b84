"""Harvests the hidden states of the frozen reference, whose forward pass comes right behind the policy's."""

from __future__ import annotations

import copy

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Settings, Trainer
from torch import Tensor

from spec_plugin.actor.control import RolloutHarvest, run_blocking
from spec_plugin.actor.decoder import find_decoder

CAUGHT_BY = "hidden_states_equal_a_plain_forward"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.harvest = RolloutHarvest(self.control, lambda: find_decoder(self.reference))

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        run_blocking(self.control.finish())
        recomputed = Trainer.log_probs(self, rollouts)
        self.harvest.open()
        policy, self.policy = self.policy, self.reference
        try:
            with self.harvest.capture(lambda: self.documents(rollouts)):
                Trainer.log_probs(self, rollouts)
        finally:
            self.policy = policy
        self.check(rollouts, recomputed)
        return recomputed


class Driver(driver.Driver):
    adapter = "wrong_adapters.harvest_of_the_reference:Adapter"
