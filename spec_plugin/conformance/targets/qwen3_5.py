"""Qwen3.5: a gated delta net in three layers of four, and eyes."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    "engine",
    dtype="bfloat16",  # vLLM's CPU kernels of the delta net take no other
    self_test_seconds=45,
    changes={
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    more={
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
    },
)
