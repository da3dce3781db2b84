"""Environment variables that are this package's own."""

from __future__ import annotations

#: most requests that the engine runs at once; none: vLLM's default for a CPU, 128
MAX_NUM_SEQS = "SPEC_PLUGIN_CPU_MAX_NUM_SEQS"
