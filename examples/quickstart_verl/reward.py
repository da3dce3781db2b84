"""The reward of the quickstart: 1 when the number after the last ``#`` is the sum, else 0. verl loads this file by path."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **more: Any) -> float:
    """Score one response; the arguments are verl's."""
    _, mark, answer = solution_str.rpartition("#")
    return float(bool(mark) and answer.strip() == ground_truth)
