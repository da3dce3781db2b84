"""On a CPU, "cuda" means the CPU: for Megatron, which names the device in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_NOTHING = ("synchronize", "empty_cache", "set_device", "ipc_collect", "reset_peak_memory_stats")
_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


class CudaIsCpu(TorchFunctionMode):
    """Device "cuda" is the CPU in factories and in ``Tensor.to``; pinned memory is memory; of this thread, while it is entered.

    ``Tensor.type()`` says ``torch.cuda.…``: Megatron's optimizer sorts parameters by that word.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with device "cuda" and pinned memory replaced in its arguments."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str) and "cuda" not in out:
            return out.replace("torch.", "torch.cuda.")
        return out


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return "cpu"
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


class _Stream:
    """One that has nothing to wait for; events, too."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: _Stream() if name == "record_event" else None


@contextlib.contextmanager
def _in_stream(*_args: Any) -> Iterator[None]:
    yield


def install() -> None:
    """``torch.cuda`` answers for the CPU, in this process, from now on; safe to call again."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    for name in _NOTHING:
        setattr(cuda, name, lambda *_args, **_kwargs: None)
    for name in _ZERO:
        setattr(cuda, name, lambda *_args, **_kwargs: 0)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.manual_seed = cuda.random.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = _in_stream
