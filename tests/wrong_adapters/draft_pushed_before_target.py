"""Announces the weight sync, and refreshes the draft, before the policy's weights are sent."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

from spec_plugin.adapter import run_blocking

CAUGHT_BY = "target_arrives_before_the_draft"


class Adapter(MinimalAdapter):
    def sync(self) -> None:
        embed, head = self.policy.get_input_embeddings().weight, self.policy.get_output_embeddings().weight
        run_blocking(self.spec.weights_synced(self.policy_version(), embed, head, rollouts_begin=False))
        Trainer.sync(self)
        run_blocking(self.spec.rollouts_begin())


class Driver(driver.Driver):
    adapter = "wrong_adapters.draft_pushed_before_target:Adapter"
