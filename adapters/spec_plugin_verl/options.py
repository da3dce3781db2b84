"""verl's configuration, read once at the edge: SpecConfig, what is known of the target, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.events import TargetInfo

PREFIX = "+actor_rollout_ref.rollout.custom.spec."
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def read_config(rollout: Any) -> SpecConfig:
    """SpecConfig from ``rollout.custom.spec``; all defaults when there is none.

    Args:
        rollout: verl's RolloutConfig.

    Raises:
        SpecConfigError: naming the option as the user writes it on verl's command line.
    """
    spec = (rollout.custom or {}).get("spec")
    raw = OmegaConf.to_container(spec, resolve=True) if isinstance(spec, DictConfig) else spec
    if raw is not None and not isinstance(raw, Mapping):
        raise SpecConfigError(f"{PREFIX}*: expected options such as {PREFIX}k=3, got {raw!r}")
    return SpecConfig.parse(raw, PREFIX)


def read_target(rollout: Any, model: Any, actor_dtype: str = "bfloat16", actor_group: Any = None) -> TargetInfo:
    """What verl's configuration tells of the target and its engine.

    Args:
        rollout: verl's RolloutConfig.
        model: verl's HFModelConfig.
        actor_dtype: dtype of the actor's forward pass.
        actor_group: process group of the data-parallel actors, None for one actor.

    Raises:
        SpecConfigError: if the target's ``config.json`` cannot be read.
    """
    from verl.utils.device import get_device_name

    path = Path(model.local_path)
    try:
        hf_config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SpecConfigError(
            f"actor_rollout_ref.model.path: {path / 'config.json'} cannot be read: {error}"
        ) from error
    dtype = _DTYPES.get(rollout.dtype, rollout.dtype)
    if dtype not in _DTYPES.values():
        raise SpecConfigError(
            f"actor_rollout_ref.rollout.dtype={rollout.dtype!r}: the draft and the log-prob tolerance need it by name; set "
            f"one of {', '.join(sorted(set(_DTYPES.values())))}"
        )
    return TargetInfo(
        path=str(path),
        hf_config=hf_config,
        dtype=dtype,
        device_type=get_device_name(),
        tensor_parallel=rollout.tensor_model_parallel_size,
        data_parallel=rollout.data_parallel_size,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=rollout.max_model_len,
        sampling={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": rollout.repetition_penalty,
        },
        actor_dtype=actor_dtype,
        actor_group=actor_group,
    )


def refuse_unsupported(rollout: Any, model: Any) -> None:
    """Refuse what this version has not been shown to do, each with one sentence.

    Raises:
        SpecConfigError: naming verl's option, its value and what to set.
    """
    lora_rank = max(model.lora_rank or 0, (model.lora or {}).get("rank", 0) or 0)
    engine_kwargs = (rollout.engine_kwargs or {}).get("vllm") or {}
    ours = sorted({"speculative_config", "scheduler_cls", "worker_extension_cls"} & set(engine_kwargs))
    mtp = model.mtp is not None and model.mtp.enable
    checks = (
        (rollout.pipeline_model_parallel_size != 1, "rollout.pipeline_model_parallel_size", "pipeline parallel", "1"),
        (
            rollout.data_parallel_size != 1,
            "rollout.data_parallel_size",
            "engine data parallel",
            "1 (one replica per GPU)",
        ),
        (rollout.disaggregation.enabled, "rollout.disaggregation.enabled", "prefill-decode disaggregation", "False"),
        (rollout.quantization is not None, "rollout.quantization", "a quantized rollout engine", "null"),
        (
            lora_rank > 0 and not model.lora.get("merge", False),
            "model.lora.merge",
            "LoRA adapters in the engine",
            "True (weights are merged before they are sent)",
        ),
        (mtp, "model.mtp.enable", "a second drafting method (MTP)", "False"),
        (not rollout.calculate_log_probs, "rollout.calculate_log_probs", "unverifiable rollout log-probs", "True"),
    )
    for refused, option, what, instead in checks:
        if refused:
            raise SpecConfigError(
                f"spec-plugin does not support {what} yet: set actor_rollout_ref.{option}={instead}, or leave the flag out"
            )
    if ours:
        raise SpecConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.{ours[0]} is set, and spec-plugin sets it too: remove one of them"
        )
