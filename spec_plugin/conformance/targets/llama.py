"""Llama."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget("llama", "LlamaForCausalLM")
