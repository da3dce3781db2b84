"""Announces, with each weight sync, the embedding and the head that the run began with."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings

from spec_plugin.adapter import run_blocking

CAUGHT_BY = "weights_arrive_as_they_are"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        layers = self.policy.get_input_embeddings(), self.policy.get_output_embeddings()
        self.first = [layer.weight.detach().clone() for layer in layers]

    def announce(self) -> None:
        run_blocking(self.spec.weights_synced(self.policy_version(), *self.first))


class Driver(driver.Driver):
    adapter = "wrong_adapters.stale_embedding_and_head:Adapter"
