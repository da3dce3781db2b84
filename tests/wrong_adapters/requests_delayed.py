"""Each request waits, on the phase's clock, before it goes to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Completion, Trainer

CAUGHT_BY = "phases_are_timed_as_they_ran"
ONLY = True


class Adapter(MinimalAdapter):
    async def request(self, index: int, prompt: list[int], most: int | None = None, extra: Any = None) -> Completion:
        async with self.fronts[0].sample(prompt, self.sampling) as request:
            await asyncio.sleep(2.0)
            answer = await Trainer.request(self, index, prompt, most, request.extra_args)
            request.completed(answer.tokens, answer.version)
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.requests_delayed:Adapter"
