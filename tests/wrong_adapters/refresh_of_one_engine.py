"""Two engines: the draft reaches the first one only, and is reported as installed."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.loop import Settings
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.events import DraftRefresh, RefreshReport

CAUGHT_BY = "installed_draft_is_the_published_one"


class Adapter(PairAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.control.link = LopsidedLink(self.links)


class LopsidedLink(PairLink):
    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        return await self.links[0].install(refresh, force)


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.refresh_of_one_engine:Adapter"
