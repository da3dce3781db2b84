"""GLM-4-0414: norms behind attention and MLP too; vLLM's class hands out no hidden states by itself."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "glm4",
    "Glm4ForCausalLM",
    tokens=("<|user|>", "<|observation|>"),
    changes={"partial_rotary_factor": 0.5},
    quiet=("post_self_attn_layernorm", "post_mlp_layernorm"),
)
