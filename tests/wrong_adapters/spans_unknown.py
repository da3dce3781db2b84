"""Asynchronous: its engine does not say which version sampled what."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter

CAUGHT_BY = "policy_versions_agree"


class Adapter(LaggingAdapter):
    def sampled(self, prompt: list[int], response: list[int], version: int) -> None:
        pass


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.spans_unknown:Adapter"
