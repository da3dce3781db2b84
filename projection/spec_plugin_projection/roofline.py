"""Seconds of a decoding step from a model's shape and a card's data sheet, behind the interface of the measured cost model.

A step with b requests and k drafted tokens each, on one engine of tp cards: the host's part, weights read once, two FLOP for each
weight and token, the KV cache read by attention, collectives, and k passes of the draft. Reading and multiplying are nearly
added, not the larger one taken: so vLLM's steps were measured to behave, whose kernels are not all bound by the same
(``constants.hidden``).
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.step_cost.model import StepCost
from spec_plugin_projection.constants import Constants
from spec_plugin_projection.hardware import Card
from spec_plugin_projection.shapes import ModelShape

#: bytes of activations that cards exchange, for each number
_ACTIVATION_BYTES = 2
#: share of a card's memory that an engine takes by default: vLLM's ``gpu_memory_utilization``
_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Deployment:
    """One engine: the model, and how it is split over cards."""

    model: ModelShape
    card: Card
    tp: int = 1  # cards of one engine that split each layer
    ep: int = 1  # cards that share the experts; more than tp: several engines, with attention of their own, share them
    weight_bytes: float = 2  # of one number: 2 for bfloat16, 1 for fp8
    cache_bytes: float = 2

    @property
    def engines_together(self) -> float:
        """Engines whose tokens meet in the same experts."""
        return max(1.0, self.ep / self.tp)

    @property
    def weights(self) -> float:
        """Bytes of weights on each card, the draft's included."""
        model, experts_over = self.model, max(self.tp, self.ep)
        experts = model.layers * model.experts * model.expert_parameters
        rest = model.parameters - experts + model.draft_parameters
        return self.weight_bytes * (rest / self.tp + experts / experts_over)

    def cache_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds.

        Raises:
            SpecConfigError: if the weights alone are too large.
        """
        room = _MEMORY_SHARE * self.card.memory - self.weights
        if room <= 0:
            raise SpecConfigError(
                f"model {self.model.name}: {self.weights / 1e9:.0f} GB of weights on each of {self.tp} {self.card.name} (--tp, "
                f"--ep) do not fit into {_MEMORY_SHARE:.0%} of its {self.card.memory / 1e9:.0f} GB; split it further"
            )
        each = self.model.kv_bytes(self.cache_bytes) * (1 + 1 / self.model.layers)
        return int(room / (each / min(self.tp, self.model.kv_heads)))


@dataclass(frozen=True)
class Roofline(StepCost):
    """The cost of steps, in seconds."""

    deployment: Deployment
    constants: Constants
    mean_context: float = 0.0  # tokens of a request in the KV cache, where nobody says

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """Seconds of one step.

        Args:
            batch: requests in the step.
            k: drafted tokens of each.
            paused: with k = 0, is the draft's forward pass left out.
            context: tokens that each request has in the KV cache; None: ``mean_context``.
        """
        held = self.mean_context if context is None else context
        passes = k if k > 0 else int(not paused)
        tokens = batch * (k + 1)
        # linear in the context, which simulations rely on: what hides behind what is decided without the KV cache
        reading, multiplying = self._reading(tokens), self._multiplying(tokens)
        return (
            self.constants.step_s
            + reading
            + multiplying
            - self.constants.hidden * min(reading, multiplying)
            + self._attending(batch, k, held, self.deployment.model.layers)
            + self._exchanging(tokens)
            + passes * self._draft_pass(batch, held)
        )

    def _reading(self, tokens: float) -> float:
        """The weights that so many tokens of this engine need, on each card."""
        d = self.deployment
        touched = d.model.experts_touched(tokens * d.engines_together)
        experts = d.model.layers * touched * d.model.expert_parameters / max(d.tp, d.ep)
        read = d.weight_bytes * (d.model.shared_parameters / d.tp + experts)
        return read / (d.card.bandwidth * self.constants.weights_reached)

    def _multiplying(self, tokens: float) -> float:
        d = self.deployment
        flops = 2.0 * d.model.active_parameters * tokens / d.tp
        return flops / (d.card.flops_of(d.weight_bytes) * self.constants.products_reached)

    def _attending(self, batch: float, k: int, context: float, layers: int) -> float:
        """The KV cache of each request is read once, and a little more for each drafted token."""
        d = self.deployment
        each = d.model.kv_bytes(d.cache_bytes) * layers / d.model.layers / min(d.tp, d.model.kv_heads)
        readings = 1 + self.constants.verification_reads * k
        return batch * context * each * readings / (d.card.bandwidth * self.constants.cache_reached)

    def _exchanging(self, tokens: float) -> float:
        """Two all-reduces a layer where it is split (ring: Thakur et al. 2005), two all-to-alls where experts lie elsewhere."""
        d, layers = self.deployment, self.deployment.model.layers
        width, link = d.model.hidden * _ACTIVATION_BYTES, d.card.link * self.constants.link_reached
        seconds = 0.0
        if d.tp > 1:
            seconds += 2 * layers * (self.constants.hop_s + 2 * (d.tp - 1) / d.tp * tokens * width / link)
        if d.ep > d.tp and d.model.experts:
            sent = tokens / d.tp * d.model.experts_per_token * width * (d.ep - 1) / d.ep
            seconds += 2 * layers * (self.constants.hop_s + sent / link)
        return seconds

    def _draft_pass(self, batch: float, context: float) -> float:
        """One layer and the head, for one token of each request."""
        d, parameters = self.deployment, self.deployment.model.draft_parameters / self.deployment.tp
        reading = d.weight_bytes * parameters / (d.card.bandwidth * self.constants.weights_reached)
        flops = 2.0 * parameters * batch / (d.card.flops_of(d.weight_bytes) * self.constants.products_reached)
        hops = 2 * self.constants.hop_s if d.tp > 1 else 0.0
        return self.constants.draft_pass_s + reading + flops + hops + self._attending(batch, 0, context, 1)
