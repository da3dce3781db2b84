"""Qwen3.5, its texts: a gated delta net in three layers of four. vLLM imports it only where torchvision is installed."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    dtype="bfloat16",  # vLLM's CPU kernels of the delta net take no other
    self_test_seconds=45,
    changes={
        "linear_key_head_dim": 128,  # nor other widths
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    packages=("torchvision",),
)
