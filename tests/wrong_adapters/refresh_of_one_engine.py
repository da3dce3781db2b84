"""Two engines: the draft reaches the first one only, and is reported as installed."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.adapter import DraftRefresh, RefreshReport

CAUGHT_BY = "installed_draft_is_the_published_one"


class LopsidedLink(PairLink):
    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        return await self.call(self.engines()[0], "spec_refresh", refresh, force)


class Adapter(PairAdapter):
    link_type = LopsidedLink


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.refresh_of_one_engine:Adapter"
