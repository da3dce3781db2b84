"""A reward that even a barely taught policy earns unevenly, so that GRPO has something to do."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **more: Any) -> float:
    """Share of the digit 1 among the response's characters."""
    return solution_str.count("1") / max(1, len(solution_str))
