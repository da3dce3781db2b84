"""The worker extension inside vLLM: verl's own, plus what a draft needs."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from spec_plugin.adapter import SpecWorkerExtension


class VerlSpecWorker(SpecWorkerExtension, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker when, and only when, the flag is on."""
