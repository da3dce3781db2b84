"""What ``spec-plugin doctor`` looks at for TRL: its distributions, and what the adapter wraps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec

from spec_plugin.adapter import AdapterDoctor, Diagnosis, switch_to_cpu

_CPU, _SWITCH = "spec_plugin_trl_cpu", "SPEC_PLUGIN_TRL_CPU"
_TRL = "pip install 'trl>=1.8,<2'"


def on_cpu() -> Iterable[Diagnosis]:
    """What a run needs where vLLM's CPU build is the only vLLM; nothing is set: TRL and vLLM are imported without it."""
    needs = (
        f"a run, with the flag or without it, needs {_SWITCH}=1 ({_CPU}): else vLLM's CPU build ends it in the first weight sync "
        "(no attribute 'weight_loader')"
    )
    return [] if os.environ.get(_SWITCH) == "1" else switch_to_cpu("trl", _CPU, needs, {})


def examine() -> Iterator[Diagnosis]:
    """Each symbol of TRL that is wrapped, and Unsloth."""
    yield from wrapped_symbols()
    if find_spec("unsloth") is not None:
        fix = "do not import unsloth in a run with the flag"
        yield Diagnosis("unsloth", "note", "installed: its generated trainers and engines are refused", fix)


def wrapped_symbols() -> Iterator[Diagnosis]:
    """Each class of TRL that the adapter wraps, imported and looked at as in a run; a failure names what is not as expected."""
    try:
        registration = import_module("spec_plugin_trl.registration")
    except ImportError as error:
        yield Diagnosis("trl adapter", "fail", f"it cannot be imported: {error}", f"{_TRL} 'wrapt>=1.16'")
        return
    registration.keep_quiet()
    for module, owner in registration.WRAPPED.items():
        name = f"trl {owner}"
        try:
            registration.look_at(import_module(module))
        except Exception as error:  # besides PatchError, whatever the import of TRL or of vLLM raises
            yield Diagnosis(name, "fail", f"{type(error).__name__}: {error}", f"{_TRL}, with the vLLM that it supports")
        else:
            yield Diagnosis(name, "ok", f"{module}: all that is wrapped is there")


DOCTOR = AdapterDoctor(
    trainer="trl",
    distributions={"trl": _TRL, "accelerate": "pip install accelerate"},
    vllm="trl[vllm]",
    examine=examine,
    on_cpu=on_cpu,
)
