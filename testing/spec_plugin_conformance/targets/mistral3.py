"""Mistral Small 3: a Mistral with eyes."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    changes={"model_type": "mistral", "sliding_window": None},
    more={
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 32,
            "image_size": 16,
            "patch_size": 4,
        },
        "image_token_index": 2,
    },
    packages=("torchvision", "mistral_common"),
)
