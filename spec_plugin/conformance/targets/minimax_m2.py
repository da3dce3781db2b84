"""MiniMax M2: experts, part of each head rotated."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    "engine",
    tokens=("[e~[",),  # verl asks for it
    changes={
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "rotary_dim": 16,
    },
)
