"""Reports every second refresh as installed without sending it."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.adapter import DraftRefresh, LocalLink, RefreshReport

CAUGHT_BY = "installed_draft_is_the_published_one"


class ForgetfulLink(LocalLink):
    calls = 0

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.calls += 1
        if self.calls % 2 == 0:
            return RefreshReport(True, refresh.draft_version, refresh.digest, 0.0)
        return await super().install(refresh, force)


class Adapter(MinimalAdapter):
    link_type = ForgetfulLink


class Driver(driver.Driver):
    adapter = "wrong_adapters.refresh_skipped_after_wake:Adapter"
