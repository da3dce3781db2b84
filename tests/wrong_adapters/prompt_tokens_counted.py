"""Counts a request's prompt among the tokens that it generated."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

CAUGHT_BY = "token_counts_are_the_engines"


class Adapter(MinimalAdapter):
    async def request(self, index: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        with self.front.request() as counted:
            answer = await Trainer.request(self, index, prompt)
            counted.tokens = len(prompt) + len(answer[0])
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.prompt_tokens_counted:Adapter"
