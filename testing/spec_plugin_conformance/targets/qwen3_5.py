"""Qwen3.5: a gated delta net in three layers of four, and eyes."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    tokens=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    processor=("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    packages=("torchvision", "qwen_vl_utils"),
    dtype="bfloat16",  # vLLM's CPU kernels of the delta net take no other
    self_test_seconds=45,
    changes={
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    more={
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
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
