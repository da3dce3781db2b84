"""What can be wrong with a draft, a target or a rank."""

from __future__ import annotations


class DraftConfigError(ValueError):
    """A draft, or a target for which a draft is wanted, has a shape, an option or a number that cannot work."""


class CheckpointError(RuntimeError):
    """A checkpoint is torn, missing or not what its digest says."""


class OtherRankFailed(RuntimeError):
    """Nothing is wrong on this rank: it stops because another one did, whose own log says why."""

    def __init__(self, what: str) -> None:
        super().__init__(f"another rank could not {what}; its own log says why")
