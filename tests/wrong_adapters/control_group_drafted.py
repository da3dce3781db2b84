"""What keeps a request without drafts is not passed on: the control group is drafted for, and told as plain."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Completion, Trainer

CAUGHT_BY = "speculation_is_told_as_it_was"


class Adapter(MinimalAdapter):
    async def request(self, index: int, prompt: list[int], most: int | None = None, extra: Any = None) -> Completion:
        async with self.fronts[0].sample(prompt, self.sampling) as request:
            passed_on = {name: value for name, value in request.extra_args.items() if name != "spec_off"}
            answer = await Trainer.request(self, index, prompt, most, passed_on)
            request.completed(answer.tokens, answer.version, answer.log_probs)
        return answer


class Driver(driver.Driver):
    adapter = "wrong_adapters.control_group_drafted:Adapter"
