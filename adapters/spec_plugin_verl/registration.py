"""Registers the adapter's classes in verl's own registries; no method of verl is patched."""

from __future__ import annotations

from typing import Any

ROLLOUT_KEY = ("vllm", "async")
ADAPTER = "spec_plugin_verl.rollout.server_adapter"


def register() -> None:
    """Take over verl's vLLM rollout and the actor engines that are there, in place, once per process.

    The rollout keeps the name ``vllm``: under a new one verl would drop priorities, prefill-decode and delta syncs.
    """
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from spec_plugin_verl.backends import BACKENDS, mixed

    RolloutReplicaRegistry.register("vllm", _load_replica)
    base._ROLLOUT_REGISTRY[ROLLOUT_KEY] = ADAPTER
    engines: dict[str, dict[Any, type]] = EngineRegistry._engines["language_model"]
    for backend in BACKENDS.keys() & engines.keys():
        engines[backend] = {device: mixed(backend, engine) for device, engine in engines[backend].items()}


def _load_replica() -> type:
    from spec_plugin_verl.server import SpecReplica

    return SpecReplica
