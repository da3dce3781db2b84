"""Asynchronous: refreshes the draft, and begins the phase, before the policy's weights are sent."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter

CAUGHT_BY = "target_arrives_before_the_draft"


class Adapter(LaggingAdapter):
    def announce(self) -> None:
        pass

    def sync(self) -> None:
        if self.engine.version >= 0:
            super().announce()
            super().sync()
        else:
            super().sync()
            super().announce()


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.refreshed_before_the_sync:Adapter"
