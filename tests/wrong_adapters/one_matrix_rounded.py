"""One matrix goes through bfloat16 on its way to a single precision engine."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from torch import Tensor

CAUGHT_BY = "every_weight_arrives"
ONLY = True


class Adapter(MinimalAdapter):
    def start_engine(self) -> None:
        super().start_engine()
        load = self.engine.load_policy

        async def load_rounded(version: int, weights: dict[str, Tensor]) -> None:
            await load(version, {name: rounded(name, tensor) for name, tensor in weights.items()})

        self.engine.load_policy = load_rounded


def rounded(name: str, tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float() if name.endswith("layers.1.mlp.gate_proj.weight") else tensor


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_matrix_rounded:Adapter"
