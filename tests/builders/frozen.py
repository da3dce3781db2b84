"""Drafts that are served as they are: the config.json of their target, and of each kind a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

HF = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


#: config.json of a draft of each kind that fits ``HF``, beyond the sizes of its one layer
DRAFTS: Mapping[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLM"]},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "dflash": {"architectures": ["DFlashDraftModel"], "hidden_size": 64},
    "draft_model": {"architectures": ["GemmaForCausalLM"]},
    "parallel": {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 3},
}
_SIZES = {
    name: HF[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
}


def config_of(kind: str, layers: int = 1) -> dict[str, Any]:
    """config.json of a draft of this kind."""
    return {**DRAFTS[kind], **_SIZES, "head_dim": 32, "num_hidden_layers": layers, "model_type": "llama"}


def tensors_of(kind: str, layers: int = 1) -> dict[str, torch.Tensor]:
    """Every tensor that vLLM wants of it, all noughts."""
    if kind in ("dflash", "draft_model"):
        return {"fc.weight" if kind == "dflash" else "model.embed_tokens.weight": torch.zeros(2)}
    third = kind != "eagle"
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (64, 192 if third else 128)} | (
        {"norm.weight": (64,)} if third else {}
    )
    for at in range(layers):
        prefix, width = (
            ("midlayer", 128) if third and layers == 1 else (f"layers.{at}", 128 if third and not at else 64)
        )
        shapes |= {f"{prefix}.self_attn.{one}_proj.weight": (64, width) for one in "qkv"}
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (64, 64), f"{prefix}.post_attention_layernorm.weight": (64,)}
        shapes |= {f"{prefix}.mlp.{one}_proj.weight": (128, 64) for one in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (64, 128)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
