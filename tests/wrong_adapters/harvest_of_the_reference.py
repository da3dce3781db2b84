"""Harvests the hidden states of the frozen reference, whose forward pass comes right behind the policy's."""

from __future__ import annotations

import copy

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Settings, Trainer
from torch import Tensor

from spec_plugin.adapter import DecoderHarvest, find_decoder, run_blocking

CAUGHT_BY = "hidden_states_equal_a_plain_forward"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.spec.harvest = DecoderHarvest(self.spec, lambda: find_decoder(self.reference))

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        run_blocking(self.spec.rollouts_end())
        recomputed = Trainer.log_probs(self, rollouts)
        policy, self.policy = self.policy, self.reference
        try:
            with self.spec.logprob_pass(lambda: self.documents(rollouts)):
                Trainer.log_probs(self, rollouts)
        finally:
            self.policy = policy
        self.check(rollouts, recomputed)
        return recomputed


class Driver(driver.Driver):
    adapter = "wrong_adapters.harvest_of_the_reference:Adapter"
