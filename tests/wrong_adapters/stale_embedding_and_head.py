"""Announces, with each weight sync, the embedding and the head that the run began with."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings

from spec_plugin.actor.control import run_blocking
from spec_plugin.events import WeightSync

CAUGHT_BY = "weights_arrive_as_they_are"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        layers = self.policy.get_input_embeddings(), self.policy.get_output_embeddings()
        self.first = [layer.weight.detach().clone() for layer in layers]

    def refresh_draft(self) -> None:
        run_blocking(self.control.synced(WeightSync(self.policy_version(), *self.first)))


class Driver(driver.Driver):
    adapter = "wrong_adapters.stale_embedding_and_head:Adapter"
