"""The share of the wanted words that a story uses. Trainers load this file by path."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **more: Any) -> float:
    """The reward of one response; the name and the arguments are verl's."""
    used, wanted = set(re.findall("[a-z]+", solution_str.lower())), ground_truth.split()
    return sum(word in used for word in wanted) / len(wanted)
