"""Hands the trainer's log those metrics that its dashboard shows, and no others."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

CAUGHT_BY = "all_metrics_reach_the_log"

SHOWN = ("on", "failed", "acceptance_length", "draft_loss", "refresh_refused", "generation_tokens")


class Adapter(MinimalAdapter):
    def metrics(self) -> dict[str, float]:
        shown = {f"spec/{name}" for name in SHOWN}
        return {name: value for name, value in super().metrics().items() if "spec/" not in name or name in shown}


class Driver(driver.Driver):
    adapter = "wrong_adapters.metrics_dropped:Adapter"
