"""gpt-oss: experts and biases, windows in every other layer, attention sinks, yarn."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "gpt_oss",
    "GptOssForCausalLM",
    dtype="bfloat16",  # vLLM's CPU attention takes no other sinks
    attention="eager",
    changes={
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
)
