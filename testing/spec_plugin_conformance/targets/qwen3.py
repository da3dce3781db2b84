"""Qwen3."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget("qwen3", "Qwen3ForCausalLM")
