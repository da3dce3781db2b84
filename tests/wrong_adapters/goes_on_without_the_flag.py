"""An option that is refused: the run goes on without speculation, and says nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings, Trainer

from spec_plugin import SpecConfigError

CAUGHT_BY = "wrong_options_stop_the_run"
ONLY = True


class Adapter(Trainer):
    def __new__(cls, settings: Settings) -> Any:
        try:
            return MinimalAdapter(settings)
        except SpecConfigError:
            return Trainer(replace(settings, spec={}))


class Driver(driver.Driver):
    adapter = "wrong_adapters.goes_on_without_the_flag:Adapter"
