"""Opens the harvest at its start, not in each step: its first budget is its last."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings

CAUGHT_BY = "hooks_fire_in_order"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.spec.harvest.open()
        self.spec.harvest.open = lambda: None  # type: ignore[method-assign]


class Driver(driver.Driver):
    adapter = "wrong_adapters.harvest_opened_once:Adapter"
