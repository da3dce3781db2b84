"""Arcee: an MLP without a gate."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget("arcee", "ArceeForCausalLM")
