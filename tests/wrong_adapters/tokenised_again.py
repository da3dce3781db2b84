"""Makes token ids of the text of each response, as a tokenizer that does not round-trip does, and trains on these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def generate(self, prompts: Any) -> Rollouts:
        rollouts = super().generate(prompts)
        again = [[token - token % 2 if token > 2 else token for token in row] for row in rollouts.responses]
        return replace(rollouts, responses=again)


class Driver(driver.Driver):
    adapter = "wrong_adapters.tokenised_again:Adapter"
