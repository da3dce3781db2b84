"""Two engines: the last one is tested, and answers for both."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.loop import Settings
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.events import SelfTestReport

CAUGHT_BY = "samples_are_the_targets"


class Adapter(PairAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.control.link = TrustingLink(self.links)


class TrustingLink(PairLink):
    async def self_test(self, seconds: float) -> SelfTestReport:
        return await self.links[-1].self_test(seconds)


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.self_test_of_one_engine:Adapter"
