"""The ranks of an actor: all of them train one draft, one of them speaks to the engines, and what must agree is agreed here.

A rank that leaves a collective call out lets all others wait until their time limit; so nothing is assumed to be the same
on all ranks because it ought to be. Functions marked *collective* are called by every rank, equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from draft_training import OtherRankFailed
from spec_plugin.api.errors import SpecPluginError

T = TypeVar("T")
#: Seconds after which a rank that does not come is given up. More than all that the first rank may do meanwhile: wait for weights
#: (600), test the engines, refresh; and another limit than the trainer's, which may be shorter than that.
LIMIT_S = 3600.0


class RanksPartedError(SpecPluginError):
    """A rank did not come to a collective call in time: from here on nothing can be agreed."""


@dataclass
class _Own:
    """Groups of our own: what is agreed in a thread beside the trainer must not meet the trainer's own calls."""

    world: Any  # the group that they were made of
    flags: Any  # gloo: what fails there raises, and stops nobody's process
    data: Any  # for the draft's tensors, on whatever device they are
    parted: bool = False


_own: _Own | None = None


def _groups() -> _Own | None:
    """Those of this process; None for a single rank (collective the first time)."""
    global _own
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return None
    world = dist.group.WORLD
    if _own is None or _own.world is not world:
        limit = timedelta(seconds=LIMIT_S)
        flags = dist.new_group(backend="gloo", timeout=limit)
        _own = _Own(world, flags, dist.new_group(timeout=limit) if torch.cuda.is_available() else flags)
    return _own


def actor_group() -> Any:
    """A group of our own of all actor ranks, for the draft's tensors; None for a single one (collective the first time)."""
    own = _groups()
    return None if own is None else own.data


def rank() -> int:
    """Of this process among the actor's; 0 of a single one."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Is this the rank that holds the link to the engines, reports metrics and saves; true of a single one."""
    return rank() == 0


def _agreed(call: Callable[[Any], T]) -> T:
    """The outcome of a collective call in a group of all ranks.

    Raises:
        RanksPartedError: if a rank does not come to it; and from then on at once, since nobody knows where the others are.
    """
    own = _groups()
    assert own is not None
    if own.parted:
        raise RanksPartedError("the actor's ranks have stopped agreeing earlier in this run; that error says why")
    try:
        return call(own.flags)
    except RuntimeError as error:
        own.parted = True
        raise RanksPartedError(
            f"a rank of the actor did not join a collective call within {LIMIT_S:g} s, or its process is gone: {error}"
        ) from error


def of_first(value: T) -> T:
    """The first rank's value, on every rank (collective)."""
    if _groups() is None:
        return value
    found = [value]
    _agreed(lambda group: dist.broadcast_object_list(found, src=0, group=group))
    return found[0]


def _of_all(value: T, group: Any) -> list[T]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def on_any_rank(*flags: bool) -> tuple[bool, ...]:
    """For each flag: is it set on any rank (collective)."""
    if _groups() is None:
        return flags
    return tuple(map(any, zip(*_agreed(lambda group: _of_all(flags, group)), strict=True)))


def most_of_any_rank(value: float) -> float:
    """The largest of all ranks' values (collective)."""
    if _groups() is None:
        return value
    return max(_agreed(lambda group: _of_all(value, group)))


def sum_of_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of all ranks' arrays, of one shape (collective)."""
    if _groups() is None:
        return values
    return np.sum(_agreed(lambda group: _of_all(values, group)), axis=0)  # type: ignore[no-any-return]


@contextmanager
def together(what: str, among: Any = None) -> Iterator[None]:
    """Go on behind the block only if every rank came through it (collective).

    Args:
        what: for the message.
        among: group of the ranks that share it; none: all ranks of the actor.

    Raises:
        OtherRankFailed: if another rank did not.
    """
    done = False
    try:
        yield
        done = True
    finally:
        failed = any(_of_all(not done, among)) if among is not None else on_any_rank(not done)[0]
    if failed:
        raise OtherRankFailed(what)
