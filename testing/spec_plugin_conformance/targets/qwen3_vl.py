"""Qwen3-VL: images, whose features enter the first layers, too."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    tokens=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    changes={
        "architectures": ["Qwen3ForCausalLM"],  # vLLM 0.29 on a CPU looks for it there, and dies where it is missing
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
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
    processor=("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    packages=("torchvision", "qwen_vl_utils"),
)
