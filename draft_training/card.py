"""What training beside a policy on one card needs: fast matrix products, and memory that is given back between slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from draft_training.batch import TENSORS, Document

logger = logging.getLogger(__name__)


@contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """Gradients on, inference mode and autocast off, whatever the caller is in, whose own modes hold again after the block.

    On a card float32 matrix products are rounded to TF32, too: the draft is a guess that the policy verifies, and ten bits of
    mantissa are enough for it.
    """
    products = _rounded_products() if device.type == "cuda" else nullcontext()
    autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), autocast, products:
        yield


@contextmanager
def _rounded_products() -> Iterator[None]:
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

    def __init__(
        self,
        device: torch.device,
        changing: Callable[[], Iterable[Tensor]],
        constant: Callable[[], Iterable[Tensor]] = tuple,
        rounded: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """Nothing moves before the first ``on_device`` ends.

        Args:
            device: where the tensors are worked with.
            changing: names them as they are then; more, and others, may come in the block and between two.
            constant: those that nothing changes in the block: they are copied to the device, and not back.
            rounded: those of the changing ones that rest in bfloat16, half as large.
        """
        self._device, self._changing, self._constant, self._rounded = device, changing, constant, rounded
        self._host = WeakTensorKeyDictionary()
        self._worked_in = WeakTensorKeyDictionary()  # the dtype of each on the device
        self._constant_then: set[int] = set()  # of those on the device

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have them on the device in the block, and in the host's memory after it, even if it fails."""
        try:
            constant = {id(t) for t in _distinct(self._constant())}
            for tensor in self._distinct():
                if self._is_offloaded(tensor):
                    tensor.data = self._host[tensor].to(self._device, self._worked_in[tensor], copy=True)
                    if id(tensor) in constant:
                        self._constant_then.add(id(tensor))
            yield
        finally:
            rounded = {id(t) for t in self._rounded()}
            for tensor in self._distinct():
                self._to_host(tensor, torch.bfloat16 if id(tensor) in rounded else tensor.dtype)
            self._constant_then.clear()

    def _distinct(self) -> list[Tensor]:
        return _distinct([*self._changing(), *self._constant()])

    def _is_offloaded(self, tensor: Tensor) -> bool:
        return tensor in self._host and self._host[tensor].data_ptr() == tensor.data_ptr()

    def _to_host(self, tensor: Tensor, dtype: torch.dtype) -> None:
        if self._is_offloaded(tensor):
            return
        if tensor not in self._host:
            self._host[tensor], self._worked_in[tensor] = host_memory(tensor, dtype), tensor.dtype
        host: Tensor = self._host[tensor]
        if id(tensor) not in self._constant_then:
            host.copy_(tensor.data)
        tensor.data = host


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each once, whoever shares it; counters stay where they are."""
    return list({id(t): t for t in tensors if t.numel() > 1}.values())


def host_memory(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of the host for a copy of a tensor, pinned where there is a card, so that it moves at the speed of the bus."""
    pinned = torch.cuda.is_available()
    try:
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=pinned)
    except RuntimeError as error:  # a limit on locked memory
        logger.info("spec-plugin: the draft's host memory is not pinned, its moves are slower: %s", error)
        return torch.empty_like(like, dtype=dtype, device="cpu")


class Resident:
    """Documents where training works with them: each is moved once, as long as it is needed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[
            int, tuple[Document, Document]
        ] = {}  # the host's, so that its id stays its own, and the device's

    def of(self, document: Document, embed: Tensor) -> Document:
        """The same document on the device.

        Args:
            document: of the host.
            embed: [V, H] the policy's embedding; where it is the host's, its rows of the document's tokens come along.
        """
        if document.aux.device == self._device and embed.device == self._device:
            return document
        found = self._moved.get(id(document))
        if found is None:
            there: dict[str, Any] = {
                name: getattr(document, name).to(self._device, non_blocking=True) for name in TENSORS
            }
            if embed.device.type == "cpu":
                there["embeds"] = F.embedding(document.input_ids, embed.detach()).to(self._device)
            moved: Document = replace(document, **there)
            found = self._moved[id(document)] = (document, moved)
        return found[1]

    def forget(self) -> None:
        """Give the device's memory back."""
        self._moved.clear()
