"""Lets the guard's refusal stop the run when the policy has been updated with what was refused."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin import LogprobProvenanceError

CAUGHT_BY = "violations_stop_the_run"


class Adapter(MinimalAdapter):
    refused: LogprobProvenanceError | None = None

    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        try:
            super().check(rollouts, recomputed)
        except LogprobProvenanceError as error:
            self.refused = error

    def loss(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> Tensor:
        return super().loss(rollouts, old.nan_to_num(), advantages)

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        loss = (
            super().update(rollouts, old, advantages) if self.refused is None else self.late(rollouts, old, advantages)
        )
        if self.refused is not None:
            raise self.refused
        return loss

    def late(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        self.optimizer.zero_grad()
        self.loss(rollouts, old, advantages).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return 0.0


class Driver(driver.Driver):
    adapter = "wrong_adapters.verdict_after_the_update:Adapter"
