"""Qwen3-Next: experts, and a gated delta net in three layers of four."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    dtype="bfloat16",  # vLLM's CPU kernels of the delta net take no other
    self_test_seconds=45,
    changes={
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
)
