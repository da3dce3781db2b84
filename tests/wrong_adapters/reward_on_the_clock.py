"""The reward is computed on the phase's clock, as if it were sampling."""

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
            answer = await Trainer.request(self, index, prompt, most, request.extra_args)
            await asyncio.sleep(3.0)  # a sandbox runs the answer's code
            request.completed(answer.tokens, answer.version)
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.reward_on_the_clock:Adapter"
