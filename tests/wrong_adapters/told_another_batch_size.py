"""Says that the engine runs more requests at once than it does."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin.api.events import TargetInfo

CAUGHT_BY = "told_facts_are_the_engines"


class Adapter(MinimalAdapter):
    def target(self) -> TargetInfo:
        return replace(super().target(), max_num_seqs=2 * self.settings.max_num_seqs)


class Driver(driver.Driver):
    adapter = "wrong_adapters.told_another_batch_size:Adapter"
