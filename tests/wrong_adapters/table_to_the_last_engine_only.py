"""Two engines: the table of k reaches the last one only."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.loop import Settings
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.events import Schedule

CAUGHT_BY = "every_engine_is_told"
ONLY = True


class Adapter(PairAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.control.link = LastOnly(self.links)


class LastOnly(PairLink):
    async def set_schedule(self, schedule: Schedule) -> None:
        await self.links[-1].set_schedule(schedule)


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.table_to_the_last_engine_only:Adapter"
