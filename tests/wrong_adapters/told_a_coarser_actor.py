"""Says that the actor computes in bfloat16, so that the guard expects differences a thousand times as large."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import TargetInfo

CAUGHT_BY = "told_facts_are_the_engines"


class Adapter(MinimalAdapter):
    def target(self) -> TargetInfo:
        return replace(super().target(), actor_dtype="bfloat16")


class Driver(driver.Driver):
    adapter = "wrong_adapters.told_a_coarser_actor:Adapter"
