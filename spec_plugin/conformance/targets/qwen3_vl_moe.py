"""Qwen3-VL with experts."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    "engine",
    changes={
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    more={
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
    },
)
