"""How many requests of the control group a judged batch needs, and which sequences are judged where only some are."""

from __future__ import annotations

from collections.abc import Sequence

#: Stretches that are wanted among the sequences that are judged together, where text is older than the policy that recomputes
#: it: how far the policy has moved is measured there and nowhere else. Each gives two windows; see
#: ``spec_plugin.policy.provenance.reference`` for what so many can show.
WANTED = 6
#: share of the requests as long as nothing was judged yet, and the most that it becomes
_AT_FIRST, _MOST = 0.25, 0.5


def share_for(least: float, judged_together: int) -> float:
    """The share of the requests that gives each judged batch enough of the control group.

    Args:
        least: ``spec.control_share``; 0: none at all.
        judged_together: sequences that are judged together, or from which those are chosen; 0: not known yet.
    """
    if not least:
        return 0.0
    return min(max(_MOST, least), max(least, WANTED / judged_together if judged_together else _AT_FIRST))


def chosen_to_recompute(controlled: Sequence[bool], count: int) -> list[int]:
    """Which sequences of a batch are recomputed where only some are: half of them of the control group, if it has so many.

    Args:
        controlled: of each sequence, has it a stretch of the control group.
        count: how many are wanted.

    Returns:
        Their indices, ascending; spread evenly.
    """
    first = _spread([i for i, yes in enumerate(controlled) if yes], count // 2)
    others = [i for i in range(len(controlled)) if i not in first]
    return sorted(first + _spread(others, count - len(first)))


def _spread(indices: Sequence[int], count: int) -> list[int]:
    """So many of them, as far as there are, at even distances."""
    n = min(count, len(indices))
    return [indices[i * len(indices) // n] for i in range(n)]
