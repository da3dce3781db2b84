"""Announces the weight sync, and refreshes the draft, before the policy's weights are sent."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

from spec_plugin.actor.control import run_blocking

CAUGHT_BY = "target_arrives_before_the_draft"


class Adapter(MinimalAdapter):
    def sync(self) -> None:
        self.refresh_draft()
        Trainer.sync(self)
        run_blocking(self.control.begin())


class Driver(driver.Driver):
    adapter = "wrong_adapters.draft_pushed_before_target:Adapter"
