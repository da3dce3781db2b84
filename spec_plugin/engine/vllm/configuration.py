"""What vLLM says of an engine, under the names of ``TargetInfo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def configuration(vllm_config: Any) -> dict[str, Any]:
    """dtype, lengths, ranks, device and load format of an engine, by its ``VllmConfig``."""
    model = vllm_config.model_config
    load = vllm_config.load_config.load_format
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "device_type": str(vllm_config.device_config.device_type),
        "load_format": str(getattr(load, "value", load)),
    }


def planned_configuration(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same of an engine that would be built with these arguments, before it is; takes about a second.

    Args:
        arguments: of ``vllm.LLM``, or of ``EngineArgs``.
    """
    from vllm import EngineArgs

    return configuration(EngineArgs(**arguments).create_engine_config())
