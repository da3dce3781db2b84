"""Two rows of a batch have each other's log-probs, both as the engine stated them."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        rows, lengths = list(rollouts.log_probs), [len(row) for row in rollouts.log_probs]
        pairs = ((i, j) for i in range(len(rows)) for j in range(i) if lengths[i] == lengths[j] and rows[i] != rows[j])
        i, j = next(pairs, (0, 0))
        rows[i], rows[j] = rows[j], rows[i]
        super().check(replace(rollouts, log_probs=rows), recomputed)


class Driver(driver.Driver):
    adapter = "wrong_adapters.log_probs_of_another_row:Adapter"
