"""Asynchronous: never says that the phase has begun, so that the gate gives up waiting, and all phases are plain."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter

CAUGHT_BY = "activated_by_the_documented_flag"


class Adapter(LaggingAdapter):
    def sync(self) -> None:
        super().sync()
        self.engine.run(self.fronts[0].go_plain())


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.gate_left_shut:Adapter"
