"""What ``spec-plugin doctor`` looks at for OpenRLHF: its distributions, what it needs on a CPU, and the adapter's Ray actors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any

from spec_plugin.adapter import AdapterDoctor, Diagnosis, look_up, switch_to_cpu

_ADAPTER, _CPU = "spec_plugin_openrlhf", "spec_plugin_openrlhf_cpu"
_ACTORS = {"openrlhf engine": "engine.SpecRolloutRayActor", "openrlhf policy": "policy.SpecPolicyModelActor"}


def on_cpu() -> Iterable[Diagnosis]:
    """Set DeepSpeed's CPU switch in this process, install the shims, and say so."""
    needs = f"a run is started with: DS_ACCELERATOR=cpu python -m {_CPU} {_ADAPTER} …"
    said = switch_to_cpu("openrlhf", _CPU, needs, {"DS_ACCELERATOR": "cpu"})
    if said[0].state != "fail":
        import_module(_CPU).setup_worker()
    return said


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
    on_cpu=on_cpu,
)
