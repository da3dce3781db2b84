"""Qwen2.5-VL."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    note="with images vLLM's and verl's models differ by 0.002 nats in plain text already",
    tokens=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    changes={"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 4, 4]}},
    more={
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
    },
    mixed=False,  # verl 0.9.1 with transformers 5 dies of a batch without images
    processor=("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    packages=("torchvision", "qwen_vl_utils"),
)
