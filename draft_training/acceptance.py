"""From counts of accepted tokens to chances; without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence


def conditional_acceptance(accepted_per_pos: Sequence[float], drafts: float) -> tuple[float, ...]:
    """Chance that each drafted position is accepted, given those before it; shorter where none came so far.

    Args:
        accepted_per_pos: how often each position was accepted.
        drafts: how often the first one was drafted.
    """
    out, reached = [], drafts
    for accepted in accepted_per_pos:
        if reached <= 0:
            break
        out.append(accepted / reached)
        reached = accepted
    return tuple(out)
