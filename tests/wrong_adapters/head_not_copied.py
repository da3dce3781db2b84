"""Announces the policy's own embedding and head instead of copies: the next update changes what the draft learns from."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.actor.control import run_blocking
from spec_plugin.events import WeightSync

CAUGHT_BY = "weights_arrive_as_they_are"


class Adapter(MinimalAdapter):
    def refresh_draft(self) -> None:
        embed = self.policy.get_input_embeddings().weight.detach()
        head = self.policy.get_output_embeddings().weight.detach()
        run_blocking(self.control.synced(WeightSync(self.policy_version(), embed, head)))


class Driver(driver.Driver):
    adapter = "wrong_adapters.head_not_copied:Adapter"
