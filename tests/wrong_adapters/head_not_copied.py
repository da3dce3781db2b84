"""Announces the policy's own embedding and head instead of copies: the next update changes what the draft learns from."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.adapter import run_blocking

CAUGHT_BY = "weights_arrive_as_they_are"


class Adapter(MinimalAdapter):
    def announce(self) -> None:
        embed = self.policy.get_input_embeddings().weight.detach()
        head = self.policy.get_output_embeddings().weight.detach()
        run_blocking(self.spec.weights_synced(self.policy_version(), embed, head, copied=True))


class Driver(driver.Driver):
    adapter = "wrong_adapters.head_not_copied:Adapter"
