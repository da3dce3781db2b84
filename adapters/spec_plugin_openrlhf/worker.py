"""The worker extension inside vLLM: OpenRLHF's own, which receives the policy, plus spec-plugin's."""

from __future__ import annotations

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from spec_plugin.adapter import SpecWorkerExtension


class OpenRLHFSpecWorker(SpecWorkerExtension, WorkerWrap):  # type: ignore[misc]
    """Mixed into vLLM's worker when, and only when, ``--spec.enable`` is given."""
