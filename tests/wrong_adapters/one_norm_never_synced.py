"""One norm inside of the model stays in the engine as it was."""

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

        async def load_most(version: int, weights: dict[str, Tensor]) -> None:
            await load(version, {name: tensor for name, tensor in weights.items() if not name.endswith(LEFT_OUT)})

        self.engine.load_policy = load_most


LEFT_OUT = "layers.1.post_attention_layernorm.weight"


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_norm_never_synced:Adapter"
