"""Has another log-prob than the engine's in the last place of one row of each batch: the actor's own."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        last = len(rollouts.responses[1]) - 1
        rollouts.log_probs[1][last] = float(recomputed[1, last]) - 1e-4
        super().check(rollouts, recomputed)


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_late_token_of_one_row:Adapter"
