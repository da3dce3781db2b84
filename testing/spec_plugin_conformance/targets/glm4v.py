"""GLM-4.1V: images; vLLM's class hands out no hidden states by itself."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "glm4v",
    "Glm4vForConditionalGeneration",
    note="transformers reads a table of the vision part past its module, which FSDP2 hands out in shards, and verl's FSDP1 "
    "needs a card",
    tokens=(
        "<|image|>",
        "<|video|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|user|>",
        "<|observation|>",
    ),
    changes={
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 0.5,
        }
    },
    more={
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "image_size": 112,
            "patch_size": 14,  # verl gives prompts without images one of so many pixels
        },
        "image_token_id": 2,
        "video_token_id": 3,
        "image_start_token_id": 4,
        "image_end_token_id": 5,
        "video_start_token_id": 6,
        "video_end_token_id": 7,
    },
    processor=("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    quiet=("post_self_attn_layernorm", "post_mlp_layernorm"),
    packages=("torchvision", "qwen_vl_utils"),
)
