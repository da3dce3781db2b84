"""Mistral; as released since 0.2 it has no window (left out it would be 4096)."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget("mistral", "MistralForCausalLM", changes={"sliding_window": None})
