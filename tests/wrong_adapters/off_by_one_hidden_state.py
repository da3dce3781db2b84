"""Harvests what leaves the auxiliary layers instead of what enters them."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.actor.control import RolloutHarvest
from spec_plugin.builtin.methods.eagle3 import starting_draft

CAUGHT_BY = "hidden_states_equal_a_plain_forward"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        aux_layers = starting_draft(self.session.config, self.session.target).config.aux_layers
        self.harvest = RolloutHarvest(self.control, self.policy.model, [layer + 1 for layer in aux_layers])


class Driver(driver.Driver):
    adapter = "wrong_adapters.off_by_one_hidden_state:Adapter"
