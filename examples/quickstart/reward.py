"""The reward of the quickstart: 1 when the number after the last ``#`` is the sum, else 0. Trainers load this file by path."""

from __future__ import annotations

from typing import Any

END = "<|im_end|>"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **more: Any) -> float:
    """Score one response; the name and the arguments are verl's."""
    _, mark, answer = solution_str.rpartition("#")
    return float(bool(mark) and answer.strip() == ground_truth)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Score one response; the name and the arguments are OpenRLHF's, whose one query is prompt, response and end token."""
    (query,), (prompt,), (label,) = queries, prompts, labels
    score = compute_score("", query.removeprefix(prompt).removesuffix(END), label)
    return {"rewards": score, "scores": score}
