"""What Triton's interpreter lacks to run vLLM's kernels, and what makes it slow; each symbol stands in the package's table."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.backends as backends
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from spec_plugin_cpu.v2_runner import RunnerError

_DONE = "_spec_plugin_cpu"


def _expect(owner: Any, path: str, *landmarks: str) -> Any:
    """A symbol of Triton's, if its source still contains these.

    Raises:
        RunnerError: if it is gone, or contains something else.
    """
    found = functools.reduce(lambda held, name: getattr(held, name, None), path.split("."), owner)
    text = inspect.getsource(found) if found is not None else ""
    missing = [mark for mark in landmarks if mark not in text]
    if found is None or missing:
        why = f"no longer contains {missing[0]!r}" if found is not None else "is gone"
        raise RunnerError(
            f"{owner.__name__}.{path} {why}: this Triton's interpreter is not that of 3.9.0, see spec_plugin_cpu.v2_runner"
        )
    return found


class _ActiveDriver:
    """All that vLLM asks of a backend, and torch's compiler."""

    @staticmethod
    def is_active() -> bool:
        """Always."""
        return True

    @staticmethod
    def get_current_target() -> Any:
        """None: torch's compiler, which makes C++ for a CPU, then goes on without a Triton to hash.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Triton's interpreter has no target to compile for")


def add_cpu_backend() -> None:
    """Let vLLM find a backend of the name that it looks for; one that is there already is a compiler: use that instead.

    Raises:
        RunnerError: if there is one, or backends are no longer kept so.
    """
    found = backends.backends.get("cpu")
    if found is not None and found.driver is not _ActiveDriver:
        raise RunnerError(
            "this Triton has a CPU backend of its own: unset SPEC_PLUGIN_CPU_RUNNER, vLLM takes V2 with it"
        )
    _expect(backends, "Backend", "compiler", "driver")
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_ActiveDriver)


def fill_gaps() -> None:
    """A mask that is no bool, and ``log1p``."""
    if hasattr(libdevice.log1p, _DONE):
        return
    store = _expect(interpreter, "InterpreterBuilder.create_masked_store", "mask.data)")
    _expect(libdevice, "log1p", "...")

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        return store(self, pointers, value, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), policy)

    def log1p(x: Any, **_: Any) -> Any:
        with np.errstate(all="ignore"):  # of -1 and less, where a mask takes the result away
            found = np.log1p(x.handle.data)
        return tl.tensor(interpreter.TensorHandle(found, x.handle.dtype), x.type)

    setattr(log1p, _DONE, True)
    interpreter.InterpreterBuilder.create_masked_store = create_masked_store
    libdevice.log1p = log1p


def speed_up() -> None:
    """Do once what the interpreter does for every launch of a kernel, or leave it out where tensors are on the CPU anyway."""
    if hasattr(interpreter._get_np_dtype, _DONE):
        return
    patch = _expect(interpreter, "_patch_lang", "fn.__globals__", "tl.core", "return scope")
    for_launch, for_return = (f"GridExecutor.{name}" for name in ("_init_args_hst", "_restore_args_dev"))
    _expect(interpreter, for_launch, "return args_hst, kwargs_hst")
    _expect(interpreter, for_return, "copy_(arg_hst)")
    _expect(interpreter, "InterpreterOptions", "sanitize_overflow")
    dtype_of = functools.cache(_expect(interpreter, "_get_np_dtype", "pointer_type", "element_ty"))
    pointer = dtype_of(tl.uint64)

    def get_np_dtype(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return pointer if isinstance(kind, tl.pointer_type) else dtype_of(kind)

    setattr(get_np_dtype, _DONE, True)
    patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # and never restored
    interpreter._patch_lang = lambda _fn: SimpleNamespace(restore=lambda: None)
    interpreter._get_np_dtype = get_np_dtype
    interpreter.GridExecutor._init_args_hst = lambda _self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda _self, *_copies: None
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
