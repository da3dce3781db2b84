"""Two engines: the table of k reaches the last one only."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.adapter import EngineSchedule, Schedule

CAUGHT_BY = "every_engine_is_told"
ONLY = True


class LastOnly(PairLink):
    async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
        answer: EngineSchedule = await self.call(self.engines()[-1], "spec_set_schedule", schedule)
        return answer


class Adapter(PairAdapter):
    link_type = LastOnly


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.table_to_the_last_engine_only:Adapter"
