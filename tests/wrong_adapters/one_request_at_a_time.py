"""A lock around each request: the engine has one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Completion

CAUGHT_BY = "requests_run_at_once"
ONLY = True


class Adapter(MinimalAdapter):
    def start_engine(self) -> None:
        super().start_engine()
        self.turn = asyncio.Lock()

    async def request(self, *args: Any) -> Completion:
        async with self.turn:
            return await super().request(*args)


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_request_at_a_time:Adapter"
