"""With the flag, responses may have half of the tokens."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Settings

CAUGHT_BY = "requests_are_the_trainers"
ONLY = True


class Adapter(MinimalAdapter):
    def __init__(self, settings: Settings) -> None:
        super().__init__(replace(settings, max_tokens=settings.max_tokens // 2))


class Driver(driver.Driver):
    adapter = "wrong_adapters.responses_cut_in_half:Adapter"
