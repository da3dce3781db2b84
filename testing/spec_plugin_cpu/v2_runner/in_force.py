"""Imported for its effect, before anything else: vLLM's V2 model runner, where the environment chooses it (see the package)."""

from spec_plugin_cpu.v2_runner import V2_ASYNC, chosen, serve_v2_on_cpu

if _runner := chosen():
    serve_v2_on_cpu(_runner == V2_ASYNC)
