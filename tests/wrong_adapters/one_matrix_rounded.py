"""One matrix goes through bfloat16 on its way to a single precision engine."""

from __future__ import annotations

from minimal_adapter import driver
from torch import Tensor

from wrong_adapters._weights import ChangesWeights

CAUGHT_BY = "every_weight_arrives"
ONLY = True


class Adapter(ChangesWeights):
    def changed_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: rounded(name, tensor) for name, tensor in weights.items()}


def rounded(name: str, tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float() if name.endswith("layers.1.mlp.gate_proj.weight") else tensor


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_matrix_rounded:Adapter"
