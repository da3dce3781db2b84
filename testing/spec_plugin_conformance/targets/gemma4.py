"""Gemma 4, its texts: scaled embeddings, capped logits, windows, norms on both sides of each part."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "gemma4_text",
    "Gemma4ForCausalLM",
    changes={
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "final_logit_softcapping": 30.0,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
)
