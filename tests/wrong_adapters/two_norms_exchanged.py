"""Two norms of a layer change places on their way to the engine: all rows arrive, none where it belongs."""

from __future__ import annotations

from minimal_adapter import driver
from torch import Tensor

from wrong_adapters._weights import ChangesWeights

CAUGHT_BY = "every_weight_arrives"


class Adapter(ChangesWeights):
    def changed_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        before, after = (f"model.layers.1.{name}_layernorm.weight" for name in ("input", "post_attention"))
        return {**weights, before: weights[after], after: weights[before]}


class Driver(driver.Driver):
    adapter = "wrong_adapters.two_norms_exchanged:Adapter"
