"""A refresh as a trainer sends it, and what the engine has of it."""

from __future__ import annotations

from typing import Any

import small
import torch

from spec_plugin.engine.vllm.repairs.on_cpu import cpu_repairs, on_cpu
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters


def push(llm: Any, tensors: dict[str, torch.Tensor], version: int | None = None, **options: Any) -> dict[str, Any]:
    """Install; by default as the next version."""
    version = small.rpc(llm, "spec_draft_info")["draft_version"] + 1 if version is None else version
    return small.install(llm, tensors, version, **options)


def target_bits(worker: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in worker.model_runner.get_model().named_parameters()}


def send_target(llm: Any, tensors: dict[str, torch.Tensor]) -> None:
    """A weight sync, as a trainer's worker extension does it; vLLM's CPU build wants the weights packed again."""

    def load(worker: Any) -> None:
        model = worker.model_runner.get_model()
        model.load_weights(tensors.items())
        if on_cpu():
            cpu_repairs().repack(model)

    small.rpc(llm, load)


def acceptance_length(llm: Any) -> float:
    before = read_spec_counters()
    small.greedy(llm)
    after = read_spec_counters()
    return 1 + (after["accepted_tokens"] - before["accepted_tokens"]) / (after["drafts"] - before["drafts"])
