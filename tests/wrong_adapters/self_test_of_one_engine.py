"""Two engines: the last one is tested, and answers for both."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.pair import PairAdapter, PairLink

from spec_plugin.adapter import SelfTestPart, SelfTestReport

CAUGHT_BY = "samples_are_the_targets"


class TrustingLink(PairLink):
    async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
        return await self.call(self.engines()[-1], "spec_self_test", seconds, 1, part)


class Adapter(PairAdapter):
    link_type = TrustingLink


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.self_test_of_one_engine:Adapter"
