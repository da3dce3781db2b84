"""Reports every second refresh as installed without sending it."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import Link, MinimalAdapter
from minimal_adapter.loop import Settings

from spec_plugin.events import DraftRefresh, RefreshReport

CAUGHT_BY = "installed_draft_is_the_published_one"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.link = self.control.link = ForgetfulLink(self.front)


class ForgetfulLink(Link):
    calls = 0

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.calls += 1
        if self.calls % 2 == 0:
            return RefreshReport(True, refresh.draft_version, refresh.digest, 0.0)
        return await super().install(refresh, force)


class Driver(driver.Driver):
    adapter = "wrong_adapters.refresh_skipped_after_wake:Adapter"
