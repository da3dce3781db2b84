"""Where the loss is what recomputes log-probs, harvests its second pass over the batch: by weights that have moved since."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Trainer
from torch import Tensor

from spec_plugin.adapter import run_blocking

CAUGHT_BY = "hidden_states_equal_a_plain_forward"


class Adapter(MinimalAdapter):
    def log_probs(self, rollouts: Rollouts) -> Tensor:
        run_blocking(self.spec.rollouts_end())
        recomputed = Trainer.log_probs(self, rollouts)
        self.check(rollouts, recomputed)
        return recomputed

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        loss = Trainer.update(self, rollouts, old, advantages)
        with self.spec.logprob_pass(lambda: self.documents(rollouts)):
            self.policy_log_probs(rollouts)
        self.spec.policy_updated(self.step)
        return loss


class Driver(driver.Driver):
    adapter = "wrong_adapters.harvest_of_a_later_pass:Adapter"
