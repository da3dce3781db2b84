"""What training beside a policy on one card needs: fast matrix products, and memory that is given back between slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger(__name__)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a card, float32 matrix products are rounded to TF32 in the block; the caller's own setting holds again after it.

    The draft is a guess that the policy verifies: ten bits of mantissa are enough for it. Nothing changes on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    switch = torch.backends.cuda.matmul
    name, fast = ("fp32_precision", "tf32") if hasattr(switch, "fp32_precision") else ("allow_tf32", True)
    before = getattr(switch, name)
    setattr(switch, name, fast)
    try:
        yield
    finally:
        setattr(switch, name, before)


class HostOffload:
    """Keeps tensors in the host's memory except while they are worked with; the tensor objects stay the same.

    The host's copies are pinned where that is possible, and kept: what moves does so at the speed of the bus, and nothing
    is allocated after the first time.
    """

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Nothing moves before the first ``on_device`` ends.

        Args:
            device: where the tensors are worked with.
            tensors: names them as they are then; more, and others, may come in the block and between two.
        """
        self._device, self._tensors = device, tensors
        self._host = WeakTensorKeyDictionary()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have them on the device in the block, and in the host's memory after it, even if it fails."""
        for tensor in self._distinct():
            if self._is_offloaded(tensor):
                tensor.data = self._host[tensor].to(self._device, copy=True)
        try:
            yield
        finally:
            for tensor in self._distinct():
                self._to_host(tensor)

    def _distinct(self) -> list[Tensor]:
        """Each once, whoever shares it; counters stay where they are."""
        return list({id(t): t for t in self._tensors() if t.numel() > 1}.values())

    def _is_offloaded(self, tensor: Tensor) -> bool:
        return tensor in self._host and self._host[tensor].data_ptr() == tensor.data_ptr()

    def _to_host(self, tensor: Tensor) -> None:
        if tensor not in self._host:
            self._host[tensor] = _host_memory(tensor)
        host: Tensor = self._host[tensor]
        host.copy_(tensor.data)
        tensor.data = host


def _host_memory(like: Tensor) -> Tensor:
    pinned = torch.cuda.is_available()
    try:
        return torch.empty_like(like, device="cpu", pin_memory=pinned)
    except RuntimeError as error:  # a limit on locked memory
        logger.info("spec-plugin: the draft's host memory is not pinned, its moves are slower: %s", error)
        return torch.empty_like(like, device="cpu")
