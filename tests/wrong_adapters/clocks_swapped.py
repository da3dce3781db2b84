"""Two engines: each request is timed on the clock of the other one."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.loop import Completion, Trainer
from minimal_adapter.pair import PairAdapter

CAUGHT_BY = "phases_are_timed_as_they_ran"
ONLY = True


class Adapter(PairAdapter):
    async def request(self, index: int, prompt: list[int], most: int | None = None, extra: Any = None) -> Completion:
        async with self.fronts[(index + 1) % len(self.fronts)].sample(prompt, self.sampling) as request:
            answer = await Trainer.request(self, index, prompt, most, request.extra_args)
            request.completed(answer.tokens, answer.version)
        return answer


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.clocks_swapped:Adapter"
