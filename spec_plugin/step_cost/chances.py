"""Tokens of a verification step from the chances of drafted positions, and the chances from counts: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from draft_training.acceptance import conditional_acceptance
from spec_plugin.api.events import RolloutStats


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


def acceptance_of(stats: RolloutStats, past_end: bool = False) -> tuple[float, ...]:
    """Chance of each position. Steps with a smaller k never drafted the later ones: the step log says how many did.

    Args:
        stats: of a rollout that drafted.
        past_end: count a token that was accepted beyond its response's end, which the response has no room for, too.
    """
    lost = [0] * len(stats.past_end_per_pos) if past_end else stats.past_end_per_pos
    if not stats.accepted_per_pos:  # an engine that counts no positions
        k = max(1, round(stats.draft_tokens / stats.drafts))
        length = 1.0 + (stats.accepted_tokens - sum(lost)) / stats.drafts
        return (constant_acceptance(length, k),) * k
    kept = [max(0, n - past) for n, past in zip_longest(stats.accepted_per_pos, lost, fillvalue=0)]
    raw = conditional_acceptance(kept, stats.forwards)
    drafted = [sum(count for k, count in stats.drafted_by_k if k > i) for i in range(len(kept))]
    if not drafted or drafted[0] <= 0:
        return raw
    out = []
    for chance, now, before in zip(raw, drafted, (drafted[0], *drafted), strict=False):
        if now <= 0:
            break  # never drafted: nothing is known, the last known chance is as good a guess as any
        out.append(min(1.0, chance * before / now))
    return tuple(out)
