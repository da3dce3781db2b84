"""Errors that are not about one file or one option."""

from __future__ import annotations


class OtherRankFailed(RuntimeError):
    """Nothing is wrong on this rank: it stops because another one did, whose own log says why."""

    def __init__(self, what: str) -> None:
        super().__init__(f"another rank could not {what}; its own log says why")
