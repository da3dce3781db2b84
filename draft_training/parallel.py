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


class Ranks:
    """Sums and copies among the ranks of a process group: all must make the same calls; one process alone waits for nobody."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Nothing is exchanged before the first call.

        Args:
            group: of the ranks; None: this process alone.
            device: of the tensors that are exchanged.
        """
        self._group, self._device = group, device

    @property
    def alone(self) -> bool:
        """True if there is no other rank, and no collective call is made."""
        return self._group is None

    @property
    def first(self) -> bool:
        """Is this the rank whose draft, or files, the others take."""
        return self._group is None or dist.get_rank(self._group) == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place (collective)."""
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)
        return tensor

    def any(self, flag: bool) -> bool:
        """True on all ranks if it is true on one."""
        if self._group is None:
            return flag
        return bool(self.sum(torch.tensor([float(flag)], device=self._device)).item())

    @contextmanager
    def all_or_none(self, mine: Tensor) -> Iterator[Tensor]:
        """Run the block, then add its ``mine`` up over all ranks, into what this yields; all raise if one of them does.

        Raises:
            OtherRankFailed: where the block raised on another rank alone.
        """
        total = torch.zeros_like(mine)
        error: Exception | None = None
        try:
            yield total
        except Exception as failure:
            error = failure
        summed = self.sum(torch.cat([mine, mine.new_tensor([float(error is not None)])]))
        if error is not None:
            raise error
        if float(summed[-1]):
            raise OtherRankFailed("train the draft")
        total.copy_(summed[:-1])

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add each parameter's gradient over the ranks; one that has none counts as zero."""
        if self._group is None:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        parts = torch.split(self.sum(flat), [p.numel() for p in parameters])
        for p, grad in zip(parameters, parts, strict=True):
            p.grad = grad.view_as(p)

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
