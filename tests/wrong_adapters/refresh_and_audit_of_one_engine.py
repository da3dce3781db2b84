"""Two engines: draft and audit reach the first one only; the other one never answers."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.loop import Settings
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.events import DraftRefresh, EngineState, RefreshReport

CAUGHT_BY = "every_engine_is_told"
ONLY = True


class Adapter(PairAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.control.link = FirstOnly(self.links)


class FirstOnly(PairLink):
    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        return await self.links[0].install(refresh, force)

    async def state(self, moment: str) -> EngineState:
        return await self.links[0].state(moment)


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.refresh_and_audit_of_one_engine:Adapter"
