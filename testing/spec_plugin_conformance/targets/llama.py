"""Llama."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget("llama", "LlamaForCausalLM")
