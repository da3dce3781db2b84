"""Ranks: the data-parallel processes that train one draft, or this process alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draft_training.errors import OtherRankFailed

T = TypeVar("T")


#: most numbers that are added up at once
_NUMBERS = 128


class Ranks:
    """Sums and copies among the ranks of a process group: all must make the same calls; one process alone waits for nobody.

    Nothing that may fail on one rank alone stands between two of them unless it is in ``all_or_none``: each exchange in that
    block also says whether somebody has failed since the one before. So a rank that has run out of memory is waited for by
    nobody.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Nothing is exchanged before the first call.

        Args:
            group: of the ranks; None: this process alone.
            device: of the tensors that are exchanged.
        """
        self._group, self._device = group, device
        # allocated now, so that an exchange needs no memory; always all of it, so that any two of them fit each other
        self._exchanged = torch.zeros(_NUMBERS + 1, dtype=torch.float64, device=device)
        self._told: BaseException | None = None  # the last error that the other ranks know of

    @property
    def count(self) -> int:
        """Number of ranks."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def first(self) -> bool:
        """Is this the rank whose draft, or files, the others take."""
        return self._group is None or dist.get_rank(self._group) == 0

    def sum(self, numbers: Tensor) -> Tensor:
        """Add up a few numbers over the ranks (collective, in ``all_or_none``).

        Raises:
            OtherRankFailed: if another rank has failed since the last exchange.
        """
        if self._group is None:
            return numbers
        total = torch.empty_like(numbers)  # before the exchange: what fails here, all hear of
        mine = self._exchanged[: numbers.numel()]
        self._exchanged.zero_()
        mine.copy_(numbers)
        self._exchange()
        return total.copy_(mine)

    def any(self, flag: bool) -> bool:
        """True on all ranks if it is true on one (collective, in ``all_or_none``)."""
        if self._group is None:
            return flag
        self._exchanged.zero_()
        self._exchanged[0] = float(flag)
        self._exchange()
        return bool(self._exchanged[0] > 0)

    def _exchange(self, error: BaseException | None = None) -> None:
        assert self._group is not None
        self._exchanged[-1] = float(error is not None)
        self._told = error
        try:
            dist.all_reduce(self._exchanged, op=dist.ReduceOp.SUM, group=self._group)
        except Exception as broken:  # nobody can be told of that
            self._told = broken
            raise
        if error is None and float(self._exchanged[-1]):
            self._told = OtherRankFailed("train the draft")
            raise self._told

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What fails in the block on one rank is raised on all of them: at their next exchange, at the block's end at the latest.

        Blocks may be nested (collective).

        Raises:
            OtherRankFailed: where the block failed on another rank alone.
        """
        try:
            yield
            if self._group is not None:
                self._exchange()
        except Exception as error:
            if self._group is not None and error is not self._told:
                self._exchanged.zero_()
                self._exchange(error)
            raise

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of any size over the ranks, in place (collective).

        The ranks must have agreed since the tensor was made, so that each of them has one.
        """
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)
        return tensor

    def flat_gradients(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """All gradients in one vector, for ``add_up``; a parameter that has none counts as zero. None for one process alone."""
        if self._group is None:
            return None
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])

    def overwrite_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's tensors into those of the others, in place."""
        if self._group is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=self._source, group=self._group)

    def object_from_first(self, value: T) -> T:
        """The first rank's value on every rank; it is pickled."""
        if self._group is None:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=self._source, group=self._group)
        out: T = values[0]
        return out

    def tensors_from_first(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The first rank's tensors, on the host of every rank; it alone has some."""
        if self._group is None:
            return dict(tensors or {})
        kinds = self.object_from_first(tensors and [(name, t.shape, t.dtype) for name, t in tensors.items()])
        out = {}
        for name, shape, dtype in kinds or []:
            if tensors is None:
                moved = torch.empty(shape, dtype=dtype, device=self._device)
            else:
                moved = tensors[name].to(self._device, copy=True)
            self.overwrite_from_first([moved])
            out[name] = moved.cpu()
        return out

    @property
    def _source(self) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, 0)
