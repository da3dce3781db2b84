"""The ranks of an actor: all of them train one draft, one of them speaks to the engines, and what must agree is agreed here.

A rank that leaves a collective call out lets all others wait until their time limit; so nothing is assumed to be the same
on all ranks because it ought to be. Functions marked *collective* are called by every rank, equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from draft_training import OtherRankFailed

T = TypeVar("T")


def actor_group() -> Any:
    """The group of all actor ranks; None for a single one."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def is_first() -> bool:
    """Is this the rank that holds the link to the engines, reports metrics and saves; true of a single one."""
    return actor_group() is None or dist.get_rank() == 0


def of_first(value: T) -> T:
    """The first rank's value, on every rank (collective)."""
    group = actor_group()
    if group is None:
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


def on_any_rank(*flags: bool) -> tuple[bool, ...]:
    """For each flag: is it set on any rank (collective)."""
    group = actor_group()
    if group is None:
        return flags
    found: list[tuple[bool, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(found, flags, group=group)
    return tuple(map(any, zip(*found, strict=True)))


def most_of_any_rank(value: float) -> float:
    """The largest of all ranks' values (collective)."""
    group = actor_group()
    if group is None:
        return value
    found: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return max(found)


@contextmanager
def together(what: str) -> Iterator[None]:
    """Go on behind the block only if every rank came through it (collective).

    Raises:
        OtherRankFailed: if another rank did not.
    """
    done = False
    try:
        yield
        done = True
    finally:
        (failed,) = on_any_rank(not done)
    if failed:
        raise OtherRankFailed(what)
