"""A refresh as a trainer sends it, and what the engine has of it."""

from __future__ import annotations

from typing import Any

import small
import torch

from draft_training import digest
from spec_plugin.engine.schedule.counters import read_spec_counters


def push(llm: Any, tensors: dict[str, torch.Tensor], version: int | None = None, **options: Any) -> dict[str, Any]:
    """Stage and install as a trainer does; by default the next version and the true digest."""
    version = small.rpc(llm, "spec_draft_info")["draft_version"] + 1 if version is None else version
    options = {"digest": digest(tensors), "names": list(tensors), **options}
    items = list(tensors.items())
    small.rpc(llm, "spec_stage", version, items[:3])  # in two buckets
    small.rpc(llm, "spec_stage", version, items[3:])
    return small.rpc(llm, "spec_install", version, **options)


def target_bits(worker: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in worker.model_runner.get_model().named_parameters()}


def acceptance_length(llm: Any) -> float:
    before = read_spec_counters()
    small.greedy(llm)
    after = read_spec_counters()
    return 1 + (after["accepted_tokens"] - before["accepted_tokens"]) / (after["drafts"] - before["drafts"])
