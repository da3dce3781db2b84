"""Seed-OSS: vLLM's class hands out no hidden states by itself."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget("seed_oss", "SeedOssForCausalLM")
