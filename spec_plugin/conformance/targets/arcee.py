"""Arcee: an MLP without a gate."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget("arcee", "ArceeForCausalLM")
