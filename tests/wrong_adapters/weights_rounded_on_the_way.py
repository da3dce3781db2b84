"""Sends the policy to a single precision engine by way of half precision."""

from __future__ import annotations

from minimal_adapter import driver
from torch import Tensor

from wrong_adapters._weights import ChangesWeights

CAUGHT_BY = "weights_arrive_as_they_are"


class Adapter(ChangesWeights):
    def changed_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.half().float() for name, tensor in weights.items()}


class Driver(driver.Driver):
    adapter = "wrong_adapters.weights_rounded_on_the_way:Adapter"
