"""ERNIE 4.5, dense."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    "engine",
)
