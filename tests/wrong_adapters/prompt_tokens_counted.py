"""Counts a request's prompt among the tokens that it generated."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Completion, Trainer

CAUGHT_BY = "token_counts_are_the_engines"


class Adapter(MinimalAdapter):
    async def request(self, index: int, prompt: list[int], most: int | None = None, extra: Any = None) -> Completion:
        async with self.fronts[0].sample(prompt, self.sampling) as request:
            answer = await Trainer.request(self, index, prompt, most, request.extra_args)
            request.completed(answer.tokens, answer.version)
            request.tokens += len(prompt)
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.prompt_tokens_counted:Adapter"
