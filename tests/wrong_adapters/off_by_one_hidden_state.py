"""Harvests what leaves the auxiliary layers instead of what enters them."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.trainer.decoder import find_decoder
from spec_plugin.trainer.taps import Taps

CAUGHT_BY = "hidden_states_equal_a_plain_forward"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        right = self.spec.session.method.harvest
        assert right is not None
        self.spec.harvest._taps = Taps.of(find_decoder(self.policy), [layer + 1 for layer in right])


class Driver(driver.Driver):
    adapter = "wrong_adapters.off_by_one_hidden_state:Adapter"
