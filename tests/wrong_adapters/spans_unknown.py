"""Asynchronous: its engine does not say which version sampled what."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter

from spec_plugin.adapter import LocalLink
from spec_plugin.api.spans import Span

CAUGHT_BY = "policy_versions_agree"


class SaysNothing(LocalLink):
    async def spans(self) -> list[Span]:
        return []


class Adapter(LaggingAdapter):
    link_type = SaysNothing


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.spans_unknown:Adapter"
