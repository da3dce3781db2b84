"""With the flag the engine keeps no prefixes, and the plugin is told so: it is another engine than without."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

CAUGHT_BY = "the_flag_changes_nothing_else"


class Adapter(MinimalAdapter):
    def engine_arguments(self) -> dict[str, Any]:
        given = {**Trainer.engine_arguments(self), "enable_prefix_caching": False}
        return {**given, **self.fronts[0].engine_arguments(given, self.extension)}


class Driver(driver.Driver):
    adapter = "wrong_adapters.options_that_come_with_the_flag:Adapter"
