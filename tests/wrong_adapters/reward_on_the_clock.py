"""The reward is computed on the phase's clock, as if it were sampling."""

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
            answer = await Trainer.request(self, index, prompt)
            await asyncio.sleep(3.0)  # a sandbox runs the answer's code
            counted.tokens = len(answer[0])
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.reward_on_the_clock:Adapter"
