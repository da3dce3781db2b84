"""Repairs of vLLM's CPU build, which ``spec_plugin.engine.vllm.repairs.on_cpu`` finds through an entry point."""
