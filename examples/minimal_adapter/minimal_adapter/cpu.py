"""Only for running the loop on vLLM's CPU build: that drops a layer's weight once it is packed, so no update reaches it.

A loop on a GPU needs none of this. The repair is spec-plugin's, but has nothing to do with speculation, so the run without
the flag uses it too, and imports nothing else of spec-plugin. Imports are inside the functions: the loop stays light.
"""

from __future__ import annotations

import os
from typing import Any


def prepare_process() -> None:
    """Settings of the process that starts the engine, before vLLM is imported."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM insists on a third process, for the worker


def prepare_start() -> None:
    """Between the engine's configuration and its start: fork its process, and save it half a minute of imports."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def prepare_worker() -> None:
    """Before the worker loads its model: layers keep their weights."""
    from spec_plugin.engine.vllm.repairs.on_cpu import apply_cpu_patches

    apply_cpu_patches()


def repack(model: Any) -> None:
    from spec_plugin.engine.vllm.repairs.on_cpu import repack

    repack(model)
