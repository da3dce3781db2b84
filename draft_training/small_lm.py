"""A small causal language model as a draft, distilled from the target's last states alone: its shape, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.files import own_fields
from draft_training.outside import DRAFT, TARGET, DenseModel, ModelSizes, read, short_repr, text_part

#: decoders that the trainer computes as vLLM does, by ``model_type``: of the draft, whatever the target is
_IMPLEMENTED = ("qwen3", "qwen2", "llama", "mistral")
#: of a draft that is born in the run: its layers, its width as a share of the target's, and the least width
_LAYERS, _WIDTH_SHARE, _LEAST_WIDTH = 2, 4, 64
_HEAD_DIM = 32  # the least that vLLM's CPU attention takes


@dataclass(frozen=True)
class SmallLmShape:
    """A dense causal LM of its own width, with the target's vocabulary."""

    hidden_size: int  # H, the target's
    hf: Mapping[str, Any]  # the draft's own config.json

    @property
    def model(self) -> DenseModel:
        """The sizes of the draft itself, as its config.json says them."""
        return read(DenseModel, self.hf, DRAFT)

    @property
    def vocab_size(self) -> int:
        """V, the target's."""
        return self.model.vocab_size

    @property
    def pruned(self) -> bool:
        """False: a model of its own keeps its whole head."""
        return False

    @property
    def tied(self) -> bool:
        """Are its embedding and its head one tensor."""
        return self.model.tie_word_embeddings

    @property
    def parameters(self) -> int:
        """How many numbers it has, but for biases and norms of heads, which are few."""
        model = self.model
        h, (heads, kv_heads, head_dim) = model.hidden_size, model.heads
        layer = 2 * h * (heads + kv_heads) * head_dim + 3 * h * model.intermediate_size + 2 * h
        return model.num_hidden_layers * layer + h + (1 if model.tie_word_embeddings else 2) * model.vocab_size * h

    @classmethod
    def from_target(cls, target: Mapping[str, Any], where: str = TARGET, *, length: int | None = None) -> SmallLmShape:
        """An untrained one: two Llama layers of a quarter of the target's width.

        Args:
            target: its config.json.
            where: the file of that, for the messages.
            length: tokens of the longest text that the engine serves; None: what the target's config.json says.

        Raises:
            DraftConfigError: if the target's config.json lacks a size, or has one that cannot be.
        """
        sizes = read(ModelSizes, text_part(target), where)
        hidden = max(_LEAST_WIDTH, sizes.hidden_size // _WIDTH_SHARE // _LEAST_WIDTH * _LEAST_WIDTH)
        hf = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": sizes.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": hidden // _HEAD_DIM,
            "num_key_value_heads": hidden // _HEAD_DIM,
            "head_dim": _HEAD_DIM,
            "max_position_embeddings": max(sizes.max_position_embeddings, length or 0),
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return cls(sizes.hidden_size, hf)

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], target: Mapping[str, Any], where: str = DRAFT, target_file: str = TARGET
    ) -> SmallLmShape:
        """That of a model which the user gives, checked against the target.

        Args:
            hf: the model's config.json.
            target: the target's config.json.
            where: the file of ``hf``, for the messages.
            target_file: that of ``target``.

        Raises:
            DraftConfigError: if it does not fit.
        """
        sizes = read(ModelSizes, text_part(target), target_file)
        if (family := hf.get("model_type")) not in _IMPLEMENTED:
            raise DraftConfigError(
                f"model_type={short_repr(family)} in {where} cannot be a small draft yet; dense {', '.join(_IMPLEMENTED)} can"
            )
        draft = read(DenseModel, hf, where)
        if hf.get("quantization_config"):
            raise DraftConfigError(
                f"quantization_config in {where}: a quantized draft cannot be refreshed; take one in bfloat16"
            )
        if draft.vocab_size != sizes.vocab_size:
            raise DraftConfigError(
                f"the draft's vocab_size={draft.vocab_size} differs from the target's {sizes.vocab_size}: it needs the "
                "target's tokenizer, so take a smaller model of the same family"
            )
        return cls(sizes.hidden_size, own_fields(hf))

    def to_hf(self) -> dict[str, Any]:
        """config.json as transformers and vLLM read it, without a dtype."""
        return dict(self.hf)
