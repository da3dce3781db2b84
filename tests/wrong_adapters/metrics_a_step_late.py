"""Logs, with each step, the metrics of the step before."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings

CAUGHT_BY = "all_metrics_reach_the_log"


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.before: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        now = super().metrics()
        shown, self.before = self.before or now, now
        return shown


class Driver(driver.Driver):
    adapter = "wrong_adapters.metrics_a_step_late:Adapter"
