"""What ``spec-plugin doctor`` looks at for verl: its distributions, its switches for a CPU, and its own registries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

from spec_plugin.adapter import AdapterDoctor, Diagnosis, look_up, switch_to_cpu

_ADAPTER, _CPU = "spec_plugin_verl", "spec_plugin_verl_cpu"
#: verl's own switches for a machine without an accelerator, as ``make quickstart`` sets them
_SWITCHES = {"VERL_USE_EXTERNAL_MODULES": _CPU, "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
#: of verl's actors, where what they are made of is installed
_OTHER_BACKENDS = ("veomni", "megatron")


def on_cpu() -> Iterable[Diagnosis]:
    """Set verl's CPU switches in this process, and say so; nothing where the user has chosen a platform."""
    needs = f"a run needs, as was set for this check: {' '.join(f'{k}={v}' for k, v in _SWITCHES.items())}"
    return [] if "VERL_PLATFORM" in os.environ else switch_to_cpu("verl", _CPU, needs, _SWITCHES)


def examine() -> Iterable[Diagnosis]:
    """Ask verl for its vLLM rollout, its replica and its actors' engines, as a run does; each must be the adapter's.

    verl is reached by name only: what judges a run's arguments does without it.
    """

    def engine(backend: str) -> Any:
        return import_module("verl.workers.engine").EngineRegistry.get_engine_cls("language_model", backend)

    lookups: dict[str, Callable[[], Any]] = {
        "verl rollout": lambda: import_module("verl.workers.rollout.base").get_rollout_class("vllm", "async"),
        "verl replica": lambda: import_module("verl.workers.rollout.replica").get_rollout_replica_class("vllm"),
        **{f"verl engine {backend}": partial(engine, backend) for backend in ("fsdp", "fsdp2")},
    }
    found = [look_up(name, lookup, _ADAPTER) for name, lookup in lookups.items()]
    if all(finding.state == "ok" for finding in found):
        there = import_module("verl.workers.engine").EngineRegistry._engines["language_model"]
        others = [backend for backend in _OTHER_BACKENDS if backend in there]
        found += [look_up(f"verl engine {backend}", partial(engine, backend), _ADAPTER) for backend in others]
    return found


DOCTOR = AdapterDoctor(
    trainer="verl",
    distributions={
        "ray": "pip install ray",
        "verl": "pip install 'verl>=0.9,<0.10'",
        "tensordict": "pip install tensordict==0.10.0",
        "TransferQueue": "pip install --no-deps 'TransferQueue>=0.1.10'",
    },
    vllm="verl[vllm]",
    examine=examine,
    on_cpu=on_cpu,
)
