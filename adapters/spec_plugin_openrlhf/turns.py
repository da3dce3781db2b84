"""What the engine's actor says beside each response, in OpenRLHF's ``extra_logs``: numbers, which OpenRLHF logs as means, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_plugin.engine.control import PLAIN_FROM, PLAIN_UNTIL

#: the policy versions that sampled its first and its last token
VERSION, LAST_VERSION = "rollout_policy_version", "rollout_last_policy_version"
#: what is said of a response of which nothing is known
UNKNOWN = {PLAIN_FROM: -1.0, PLAIN_UNTIL: -1.0, VERSION: -1.0, LAST_VERSION: -1.0}


@dataclass(frozen=True)
class Turn:
    """One request."""

    tokens: tuple[int, ...]  # its own, and what it sampled
    plain: dict[str, int]  # what of them is the control group's
    versions: tuple[int, int]  # that sampled the first and the last of them


def said_of(document: Sequence[int], turns: Sequence[Turn], now: int) -> dict[str, float]:
    """What is logged beside a response: which policy versions sampled it, and the control group's stretch.

    Args:
        document: its token ids, the prompt's among them.
        turns: of the requests that were made for it.
        now: policy version, for a response that no engine has sampled.
    """
    mine = [turn for turn in turns if tuple(document[: len(turn.tokens)]) == turn.tokens]
    first, last = zip(*(turn.versions for turn in mine), strict=True) if mine else ((now,), (now,))
    spans = [turn.plain for turn in mine if turn.plain]
    plain = spans[0] if len(spans) == 1 else {}  # one is all that there is room for
    bounds = {VERSION: min(first), LAST_VERSION: max(last)}
    return {name: float(value) for name, value in {PLAIN_FROM: -1, PLAIN_UNTIL: -1, **plain, **bounds}.items()}
