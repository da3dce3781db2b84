"""The last request of a step samples for another group's prompt: one group is short of a sample, another has one more."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

CAUGHT_BY = "the_flag_changes_nothing_else"


class Adapter(MinimalAdapter):
    def sample_prompts(self) -> list[list[int]]:
        prompts = super().sample_prompts()
        return [*prompts[:-1], prompts[0]]


class Driver(driver.Driver):
    adapter = "wrong_adapters.a_group_torn:Adapter"
