"""What ``spec-plugin doctor`` looks at for OpenRLHF: its distributions, what it needs on a CPU, and the adapter's Ray actors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any

from spec_plugin.adapter import AdapterDoctor, Diagnosis, look_up, missing_for_cpu

_ADAPTER = "spec_plugin_openrlhf"
_ACTORS = {"openrlhf engine": "engine.SpecRolloutRayActor", "openrlhf policy": "policy.SpecPolicyModelActor"}


def switch_to_cpu() -> Iterable[Diagnosis]:
    """Set DeepSpeed's CPU switch in this process, install the shims, and say so."""
    if missing := missing_for_cpu("openrlhf", "spec_plugin_openrlhf_cpu"):
        return missing
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import_module("spec_plugin_openrlhf_cpu").setup_worker()
    command = "DS_ACCELERATOR=cpu python -m spec_plugin_openrlhf_cpu spec_plugin_openrlhf …"
    return [
        Diagnosis("openrlhf platform", "note", "only vLLM's CPU build is here", f"a run is started with: {command}")
    ]


def examine() -> Iterable[Diagnosis]:
    """Import both Ray actors of the adapter; each looks at the class of OpenRLHF that it extends."""

    def actor(path: str) -> Any:
        module, _, name = path.partition(".")
        return getattr(import_module(f"{_ADAPTER}.{module}"), name)

    return [look_up(name, partial(actor, path), _ADAPTER) for name, path in _ACTORS.items()]


DOCTOR = AdapterDoctor(
    trainer="openrlhf",
    distributions={
        "ray": "pip install ray",
        "openrlhf": "pip install 'openrlhf>=0.11,<0.12'",
        "deepspeed": "pip install deepspeed",
    },
    vllm="openrlhf[vllm]",
    examine=examine,
    on_cpu=switch_to_cpu,
)
