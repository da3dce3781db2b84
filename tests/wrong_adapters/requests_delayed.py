"""Each request waits, on the phase's clock, before it goes to the engine."""

from __future__ import annotations

import asyncio

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

CAUGHT_BY = "phases_are_timed_as_they_ran"
ONLY = True


class Adapter(MinimalAdapter):
    async def request(self, index: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        with self.front.request() as counted:
            await asyncio.sleep(2.0)
            answer = await Trainer.request(self, index, prompt)
            counted.tokens = len(answer[0])
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.requests_delayed:Adapter"
