"""Tells the self-test another temperature than the rollouts have."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import TargetInfo

CAUGHT_BY = "told_facts_are_the_engines"


class Adapter(MinimalAdapter):
    def target(self) -> TargetInfo:
        return replace(super().target(), sampling={**self.sampling, "temperature": 0.7})


class Driver(driver.Driver):
    adapter = "wrong_adapters.told_another_sampling:Adapter"
