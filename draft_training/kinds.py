"""Which kind handles drafts of which shape."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from draft_training.config import DraftConfig
from draft_training.draft import DraftKind
from draft_training.eagle3 import Eagle3Kind
from draft_training.mtp import MtpShape
from draft_training.mtp_module import MtpKind
from draft_training.small_lm import SmallLmShape


@singledispatch
def kind_of(shape: object) -> DraftKind[Any]:
    """What builds, checks and writes drafts of this shape; a plugin adds its own by ``@kind_of.register(ItsShape)``.

    Raises:
        TypeError: for a shape of no kind.
    """
    raise TypeError(f"no kind of draft has a shape of type {type(shape).__name__}: add one by kind_of.register")


@kind_of.register(DraftConfig)
def _(shape: DraftConfig) -> DraftKind[Any]:
    return Eagle3Kind(shape)


@kind_of.register(MtpShape)
def _(shape: MtpShape) -> DraftKind[Any]:
    return MtpKind(shape)


@kind_of.register(SmallLmShape)
def _(shape: SmallLmShape) -> DraftKind[Any]:
    from draft_training.small_lm_module import SmallLmKind  # transformers' models take seconds to import

    return SmallLmKind(shape)
