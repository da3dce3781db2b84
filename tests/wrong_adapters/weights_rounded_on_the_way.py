"""Sends the policy to a single precision engine by way of half precision."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from torch import Tensor

CAUGHT_BY = "weights_arrive_as_they_are"


class Adapter(MinimalAdapter):
    def start_engine(self) -> None:
        super().start_engine()
        load = self.engine.load_policy

        async def load_rounded(version: int, weights: dict[str, Tensor]) -> None:
            await load(version, {name: tensor.half().float() for name, tensor in weights.items()})

        self.engine.load_policy = load_rounded


class Driver(driver.Driver):
    adapter = "wrong_adapters.weights_rounded_on_the_way:Adapter"
