"""What the engine's actor says beside each response, in OpenRLHF's ``extra_logs``: numbers, which OpenRLHF logs as means, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: the policy versions that sampled its first and its last token
VERSION, LAST_VERSION = "rollout_policy_version", "rollout_last_policy_version"
#: what is said of a response of which nothing is known
UNKNOWN = {VERSION: -1.0, LAST_VERSION: -1.0}


@dataclass(frozen=True)
class Turn:
    """One request."""

    tokens: tuple[int, ...]  # its own, and what it sampled
    versions: tuple[int, int]  # that sampled the first and the last of them


def said_of(document: Sequence[int], turns: Sequence[Turn], now: int) -> dict[str, float]:
    """What is logged beside a response: which policy versions sampled it.

    Args:
        document: its token ids, the prompt's among them.
        turns: of the requests that were made for it.
        now: policy version, for a response that no engine has sampled.
    """
    mine = [turn for turn in turns if tuple(document[: len(turn.tokens)]) == turn.tokens]
    first, last = zip(*(turn.versions for turn in mine), strict=True) if mine else ((now,), (now,))
    return {VERSION: float(min(first)), LAST_VERSION: float(max(last))}
