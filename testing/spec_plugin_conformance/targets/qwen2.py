"""Qwen2."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget("qwen2", "Qwen2ForCausalLM")
