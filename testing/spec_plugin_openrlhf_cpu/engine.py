"""What OpenRLHF's weight sync needs in vLLM's processes on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from spec_plugin_cpu import MAX_NUM_SEQS
from spec_plugin_cpu.repairs import compat
from spec_plugin_cpu.sleeping import sleep_on_cpu
from spec_plugin_cpu.waiting import sleep_while_waiting

from spec_plugin_openrlhf_cpu import shims

WORKER = "openrlhf.trainer.ray.vllm_worker_wrap"


def install() -> None:
    """Change the worker extension of OpenRLHF, and keep the engine's weights where a sync can reach them.

    Raises:
        PatchError: if a symbol is gone or no longer looks as expected.
    """
    shims.install()
    sleep_while_waiting()
    sleep_on_cpu()
    compat.apply_live_weights()
    if os.environ.get(MAX_NUM_SEQS):
        shims.replace(
            "vllm.engine.arg_utils",
            "EngineArgs.get_batch_defaults",
            _fewer_at_once,
            parameters=("world_size",),
            landmarks=("default_max_num_seqs",),
        )
    shims.replace(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        _processes_instead_of_ray,
        parameters=("self",),
        landmarks=("distributed_executor_backend",),
    )
    shims.replace(
        WORKER,
        "WorkerWrap.init_process_group",
        _refuse_ray_collectives,
        parameters=("self", "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"),
        landmarks=("stateless_init_process_group(",),
    )
    shims.replace(
        WORKER,
        "WorkerWrap.update_weight",
        lambda _original: update_weight,
        parameters=("self", "name", "dtype", "shape", "empty_cache"),
        landmarks=('device="cuda"', "self._model_update_group.broadcast(", "self.model_runner.model.load_weights("),
    )


def _fewer_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.usage.usage_lib import UsageContext

    def get_batch_defaults(self: Any, world_size: int) -> Any:
        tokens, _ = original(world_size)
        return tokens, dict.fromkeys(UsageContext, int(os.environ[MAX_NUM_SEQS]))

    return get_batch_defaults


def _processes_instead_of_ray(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_executor_backend == "ray":
            self.distributed_executor_backend = "mp"
        return original(self, *args, **kwargs)

    return create_engine_config


def _refuse_ray_collectives(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(
        self: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> Any:
        if use_ray:
            raise NotImplementedError("--vllm.sync_with_ray needs NCCL and does not run on a CPU: leave the flag out")
        return original(self, master_address, master_port, rank_offset, world_size, group_name, backend)

    return init_process_group


def update_weight(self: Any, name: str, dtype: torch.dtype, shape: Any, empty_cache: bool = False) -> None:
    """Receive one tensor from the trainer and load it; after the last (``empty_cache``), pack the weights again."""
    if dtype != self.model_config.dtype:
        raise ValueError(
            f"weight sync: the trainer sends {name} in {dtype}, the engine runs in {self.model_config.dtype}; both must have one "
            "dtype"
        )
    weight = torch.empty(shape, dtype=dtype)
    self._model_update_group.broadcast(weight, src=0)
    self.model_runner.model.load_weights(weights=[(name, weight)])
    if empty_cache:
        compat.repack(self.model_runner.model)
