"""Asynchronous: requests go on while new weights and the draft come in."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter

CAUGHT_BY = "target_arrives_before_the_draft"


class Adapter(LaggingAdapter):
    def sync(self) -> None:
        running = [self.engine.submit(self.request(100 + i, [5, 6, 7, 8])) for i in range(8)]
        super().sync()
        for request in running:
            request.result()


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.gate_left_open:Adapter"
