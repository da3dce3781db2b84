"""verl's Megatron engine in an actor's process without a card."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spec_plugin_verl_cpu.megatron.cuda import CudaIsCpu

#: methods of the engine inside of which "cuda" means the CPU
_METHODS = (
    "initialize",
    "infer_batch",
    "train_batch",
    "save_checkpoint",
    "load_checkpoint",
    "to",
    "optimizer_zero_grad",
    "optimizer_step",
    "lr_scheduler_step",
)
_entered = threading.local()


@contextmanager
def _cuda_is_cpu() -> Iterator[None]:
    """Enter ``CudaIsCpu`` in this thread; nested calls enter it once."""
    if getattr(_entered, "depth", 0):
        yield
        return
    _entered.depth = 1
    try:
        with CudaIsCpu():
            yield
    finally:
        _entered.depth = 0


def _inside(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _cuda_is_cpu():
            return method(*args, **kwargs)

    return wrapped


def on_cpu(engine: type) -> type:
    """The engine class, for a CPU, in float32; the process's ``torch.cuda`` changes when the first one is made."""

    def build(self: Any, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        from spec_plugin_verl_cpu.megatron import cuda, parts

        cuda.install()
        parts.install()
        object.__setattr__(engine_config, "dtype", "float32")  # frozen, and checked when it was made
        with _cuda_is_cpu():
            engine.__init__(self, model_config, engine_config, *args, **kwargs)  # type: ignore[misc]

    def weights(self: Any, *args: Any, **kwargs: Any) -> tuple[Iterator[Any], Any]:
        with _cuda_is_cpu():
            stream, peft_config = engine.get_per_tensor_param(self, *args, **kwargs)  # type: ignore[attr-defined]
        return _each_inside(iter(stream)), peft_config

    methods = {name: _inside(getattr(engine, name)) for name in _METHODS}
    methods["load_checkpoint"] = torch.no_grad()(
        methods["load_checkpoint"]
    )  # writes into parameters themselves: see table
    about = {"__module__": __name__, "__init__": build, "get_per_tensor_param": weights}
    return type(f"Cpu{engine.__name__}", (engine,), {**methods, **about})


def _each_inside(stream: Iterator[Any]) -> Iterator[Any]:
    """Not across a ``yield``: what reads the stream has a device of its own."""
    while True:
        with _cuda_is_cpu():
            item = next(stream, None)
        if item is None:
            return
        yield item


def register() -> None:
    """Replace verl's Megatron engine by ``on_cpu`` of it in verl's registry; safe to call again."""
    from verl.workers.engine import EngineRegistry

    engines = EngineRegistry._engines["language_model"].get("megatron", {})
    for device, engine in list(engines.items()):
        if engine.__module__ != __name__:
            engines[device] = on_cpu(engine)
