"""Qwen3-MoE: experts in every layer."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    changes={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
)
