"""One norm inside of the model stays in the engine as it was."""

from __future__ import annotations

from minimal_adapter import driver
from torch import Tensor

from wrong_adapters._weights import ChangesWeights

CAUGHT_BY = "every_weight_arrives"
ONLY = True


class Adapter(ChangesWeights):
    def changed_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in weights.items() if not name.endswith(LEFT_OUT)}


LEFT_OUT = "layers.1.post_attention_layernorm.weight"


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_norm_never_synced:Adapter"
