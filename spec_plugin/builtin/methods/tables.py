"""What vLLM is told of every method alike: how much to draft, and by which exact rule to accept."""

from __future__ import annotations

from typing import Any

from spec_plugin.config import SpecConfig
from spec_plugin.events import TargetInfo


def common_settings(config: SpecConfig, target: TargetInfo) -> dict[str, Any]:
    """The part of vLLM's ``speculative_config`` that is the same for all; the table makes k changeable while it runs."""
    return {
        "num_speculative_tokens": config.k,
        "num_speculative_tokens_per_batch_size": every_k(target.max_num_seqs, config.k),
        "rejection_sample_method": config.rejection_sample_method,
    }


def every_k(largest: int, k: int) -> list[tuple[int, int, int]]:
    """vLLM's (from, to, k) for batch sizes, naming each k once: its V2 model runner captures graphs for these only.

    What it says holds until the first schedule is set, which is before the first rollout.
    """
    smaller = min(k, largest - 1)  # so many batch sizes get one of their own, down to k = 0 for the largest
    single = [(largest - i, largest - i, i) for i in range(smaller)]
    return [(1, largest - smaller, k), *reversed(single)]
