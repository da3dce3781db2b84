"""With the flag, requests ignore the end of a sequence."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings

from spec_plugin.api.events import TargetInfo

CAUGHT_BY = "requests_are_the_trainers"
ONLY = True


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sampling["ignore_eos"] = True

    def target(self) -> TargetInfo:
        told = super().target()
        return replace(told, sampling={n: v for n, v in told.sampling.items() if n != "ignore_eos"})


class Driver(driver.Driver):
    adapter = "wrong_adapters.requests_that_never_stop:Adapter"
