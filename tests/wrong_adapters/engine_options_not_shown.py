"""Has the allow-list look at no engine option: a lossy one would pass."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

CAUGHT_BY = "told_facts_are_the_engines"


class Adapter(MinimalAdapter):
    def engine_arguments(self) -> dict[str, Any]:
        return {**Trainer.engine_arguments(self), **self.fronts[0].engine_arguments({}, self.extension)}


class Driver(driver.Driver):
    adapter = "wrong_adapters.engine_options_not_shown:Adapter"
