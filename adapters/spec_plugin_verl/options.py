"""The run's side of ``spec_plugin_verl_check.options``: the same objections, raised."""

from __future__ import annotations

from typing import Any

from spec_plugin_verl_check.options import LEAVE_OUT, objections, read_config, target_info

from spec_plugin.adapter import TargetInfo, load_hf_config, refuse

__all__ = ["read_config", "read_target", "refuse_unsupported"]


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

    return target_info(
        rollout,
        str(model.local_path),
        load_hf_config(str(model.local_path), "actor_rollout_ref.model.path"),
        model,
        device_type=get_device_name(),
        actor_dtype=actor_dtype,
        actor_group=actor_group,
    )


def refuse_unsupported(rollout: Any, model: Any) -> None:
    """Refuse what this version has not been shown to do, all of it at once.

    Raises:
        SpecConfigError: naming each of verl's options, its value and what to set.
    """
    from verl.utils.device import get_device_name

    refuse(objections(rollout, model, device=get_device_name()), LEAVE_OUT)
