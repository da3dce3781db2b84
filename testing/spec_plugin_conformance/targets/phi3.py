"""Phi-3: projections that are fused in the checkpoint."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "phi3",
    "Phi3ForCausalLM",
    changes={"original_max_position_embeddings": 512},
)
