"""Registers the adapter's three classes in verl's own registries; no method of verl is patched."""

from __future__ import annotations

import os
from typing import Any

ROLLOUT_KEY = ("vllm", "async")
ADAPTER = "spec_plugin_verl.rollout.server_adapter"


def register() -> None:
    """Take over verl's vLLM rollout and its FSDP actor engine, in place, once per process.

    The rollout keeps the name ``vllm``: under a new one verl would drop priorities, prefill-decode and delta syncs.
    """
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from spec_plugin_verl.actor import SpecFSDPEngine

    RolloutReplicaRegistry.register("vllm", _load_replica)
    base._ROLLOUT_REGISTRY[ROLLOUT_KEY] = ADAPTER
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    engines: dict[str, dict[Any, Any]] = EngineRegistry._engines["language_model"]
    if engines["fsdp"].get((device, vendor)) is not SpecFSDPEngine:
        EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=device, vendor=vendor)(
            SpecFSDPEngine
        )


def _load_replica() -> type:
    from spec_plugin_verl.server import SpecReplica

    return SpecReplica
