"""Tokens of a verification step from the chances of drafted positions, and the chances from counts: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from spec_plugin.events import RolloutStats


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


def acceptance_of(stats: RolloutStats) -> tuple[float, ...]:
    """Chance of each position. Steps with a smaller k never drafted the later ones: the step log says how many did."""
    if not stats.accepted_per_pos:  # an engine that counts no positions
        assert stats.acceptance_length is not None
        k = max(1, round(stats.draft_tokens / stats.drafts))
        return (constant_acceptance(stats.acceptance_length, k),) * k
    raw = conditional_acceptance(stats.accepted_per_pos, stats.forwards)
    width = len(stats.accepted_per_pos)
    drafted = [float(sum(count for k, count in stats.drafted_by_k if k > i)) for i in range(width)]
    if not drafted or drafted[0] <= 0:
        return raw
    out = []
    for i, chance in enumerate(raw):
        share = 1.0 if i == 0 else drafted[i] / drafted[i - 1] if drafted[i - 1] else 0.0
        if share <= 0.0:
            break  # never drafted: nothing is known, the last known chance is as good a guess as any
        out.append(min(1.0, chance / share))
    return tuple(out)


def kept_of(stats: RolloutStats) -> list[float]:
    """Of the tokens accepted at each position, what share lay before the response's end, over that of the position before."""
    if not stats.accepted_per_pos and stats.accepted_tokens:
        return [max(0.0, 1.0 - sum(stats.past_end_per_pos) / stats.accepted_tokens)]
    out, before = [], 1.0
    for accepted, past in zip_longest(stats.accepted_per_pos, stats.past_end_per_pos, fillvalue=0):
        if accepted <= 0 or before <= 0.0:
            break
        share = max(0.0, 1.0 - past / accepted)
        out.append(share / before)
        before = share
    return out
