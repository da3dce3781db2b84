"""Multi-token prediction: the shape of the layer that a target was trained with to predict one token more; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.files import own_fields
from draft_training.outside import TARGET, ModelBasics, MtpTarget, read, short_repr
from draft_training.rope import Rope

#: architectures (config.json) whose layer can be trained here
TRAINED = ("MiMoForCausalLM",)
#: of the layer's tensors in a checkpoint; the engine renames them when it reads them
PREFIX = "model.mtp_layers.0."


@dataclass(frozen=True)
class MtpShape:
    """MiMo's layer (MiMo technical report, arXiv 2505.07608, section 2.2), as vLLM's ``mimo_mtp.py`` runs it.

    It reads the residual stream that enters the target's final norm, and feeds its own output back for each further token.
    """

    hf: Mapping[str, Any]  # the target's config.json

    @classmethod
    def from_target(cls, hf: Mapping[str, Any], where: str = TARGET) -> MtpShape:
        """The shape of a target's own layer.

        Args:
            hf: the target's config.json.
            where: its file, for the messages.

        Raises:
            DraftConfigError: if it has no such layer, or one that cannot be trained here.
        """
        (architecture, *_) = read(ModelBasics, hf, where).architectures or ["none"]
        if architecture not in TRAINED:
            raise DraftConfigError(
                f"the MTP layer of {architecture} cannot be trained yet, only that of {', '.join(TRAINED)}: set spec.train=false "
                "to serve it as it is, or use another method"
            )
        if (layers := hf.get("num_nextn_predict_layers")) != 1 or layers is True:
            raise DraftConfigError(
                f"num_nextn_predict_layers={short_repr(layers)} in {where}: one MTP layer can be trained; use another method"
            )
        read(MtpTarget, hf, where)
        Rope.from_hf(hf, where)  # refuses what the layer does not know
        return cls(own_fields(hf))

    @property
    def layer(self) -> MtpTarget:
        """The sizes of the layer, which are those of the target's own layers."""
        return read(MtpTarget, self.hf, TARGET)

    @property
    def vocab_size(self) -> int:
        """V, the target's."""
        return self.layer.vocab_size

    @property
    def pruned(self) -> bool:
        """False: the layer has no head of its own."""
        return False

    @property
    def hidden_size(self) -> int:
        """H, the target's."""
        return self.layer.hidden_size

    @property
    def parameters(self) -> int:
        """How many numbers the layer has; biases of queries, keys and values included."""
        layer = self.layer
        h, (heads, kv_heads, head_dim) = layer.hidden_size, layer.heads
        attention = (2 * h + 1) * heads * head_dim + 2 * (h + 1) * kv_heads * head_dim
        return 2 * h * h + attention + 3 * h * layer.intermediate_size + 5 * h

    def to_hf(self) -> dict[str, Any]:
        """The target's config.json, since the layer has none of its own."""
        return dict(self.hf)
