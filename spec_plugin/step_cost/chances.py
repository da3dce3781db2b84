"""Tokens of a verification step from the chances of drafted positions, and the chances from counts: pure functions."""

from __future__ import annotations

from collections.abc import Sequence


def tokens_per_step(acceptance: Sequence[float], k: int) -> float:
    """Expected tokens of one verification step, bonus token included: 1 + the sum of the chances to come that far.

    Args:
        acceptance: chance that position i is accepted, given that those before it were; positions beyond take the last.
        k: drafted tokens.
    """
    tokens, reached = 1.0, 1.0
    for i in range(k):
        reached *= acceptance[min(i, len(acceptance) - 1)] if acceptance else 0.0
        tokens += reached
    return tokens


def constant_acceptance(length: float, k: int) -> float:
    """The alpha whose acceptance length at k is ``length``: the inverse of ``tokens_per_step`` with one alpha throughout."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step([middle], k) < length else (low, middle)
    return (low + high) / 2


def conditional_acceptance(accepted_per_pos: Sequence[int], drafts: int) -> tuple[float, ...]:
    """Chance that each position is accepted, given those before it, from vLLM's counts of accepted positions."""
    out, reached = [], drafts
    for accepted in accepted_per_pos:
        if reached == 0:
            break
        out.append(accepted / reached)
        reached = accepted
    return tuple(out)
