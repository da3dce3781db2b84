"""Two engines: each request is timed on the clock of the other one."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.loop import Trainer
from minimal_adapter.pair import PairAdapter

CAUGHT_BY = "phases_are_timed_as_they_ran"
ONLY = True


class Adapter(PairAdapter):
    async def request(self, index: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        with self.fronts[(index + 1) % len(self.fronts)].request() as counted:
            answer = await Trainer.request(self, index, prompt)
            counted.tokens = len(answer[0])
        return answer


class Driver(driver.PairDriver):
    adapter = "wrong_adapters.clocks_swapped:Adapter"
