"""GLM-4-9B: half of each head rotated, in pairs."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "glm",
    "GlmForCausalLM",
    changes={"partial_rotary_factor": 0.5},
)
