"""MiniMax M2: experts, part of each head rotated."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    "engine",
    changes={"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
)
