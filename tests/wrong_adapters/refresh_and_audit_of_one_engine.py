"""Two engines: draft and audit reach the first one only; the other one never answers."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.adapter import DraftRefresh, EngineState, RefreshReport

CAUGHT_BY = "every_engine_is_told"
ONLY = True


class FirstOnly(PairLink):
    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        return await self.call(self.engines()[0], "spec_refresh", refresh, force)

    async def state(self, moment: str) -> EngineState:
        return await self.call(self.engines()[0], "spec_state", moment)


class Adapter(PairAdapter):
    link_type = FirstOnly


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.refresh_and_audit_of_one_engine:Adapter"
