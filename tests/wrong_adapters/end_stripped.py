"""Strips the end-of-sequence token from each response before the loss, and says nothing of it."""

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
        ends = [len(r) - (r[-1] == self.policy.config.eos_token_id and len(r) > 1) for r in rollouts.responses]
        responses, stated = (
            [row[:n] for row, n in zip(rows, ends, strict=True)] for rows in (rollouts.responses, rollouts.log_probs)
        )
        return replace(rollouts, responses=responses, log_probs=stated)


class Driver(driver.Driver):
    adapter = "wrong_adapters.end_stripped:Adapter"
