"""Repairs of vLLM's CPU build, which ``spec_plugin.engine.repairs.on_cpu`` finds through an entry point."""
