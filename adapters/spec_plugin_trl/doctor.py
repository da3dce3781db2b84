"""What ``spec-plugin doctor`` looks at for TRL: its distributions, what the adapter wraps, and the variable."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec

from spec_plugin.adapter import AdapterDoctor, Diagnosis, SpecConfigError, missing_for_cpu
from spec_plugin_trl import flag

_LAUNCHER = "accelerate launch -m spec_plugin_trl script.py"
_CPU, _SWITCH = "spec_plugin_trl_cpu", "SPEC_PLUGIN_TRL_CPU"
_TRL = "pip install 'trl>=1.8,<2'"


def on_cpu() -> Iterable[Diagnosis]:
    """What a run needs where vLLM's CPU build is the only vLLM; nothing is set: TRL and vLLM are imported without it."""
    if os.environ.get(_SWITCH) == "1":
        return []
    if missing := missing_for_cpu("trl", _CPU):
        return missing
    return [Diagnosis("trl platform", "note", "only vLLM's CPU build is here", f"a run needs {_SWITCH}=1 ({_CPU})")]


def examine() -> Iterator[Diagnosis]:
    """Each symbol of TRL that is wrapped, what the variable says now, and Unsloth."""
    yield from wrapped_symbols()
    if flag.FLAG in os.environ:
        yield what_the_flag_says()
    if find_spec("unsloth") is not None:
        fix = "do not import unsloth in a run with the flag"
        yield Diagnosis("unsloth", "note", "installed: its generated trainers and engines are refused", fix)


def wrapped_symbols() -> Iterator[Diagnosis]:
    """Each class of TRL that the adapter wraps, imported and looked at as in a run; a failure names what is not as expected."""
    try:
        registration = import_module("spec_plugin_trl.registration")
    except ImportError as error:
        yield Diagnosis("trl adapter", "fail", f"it cannot be imported: {error}", "pip install 'spec-plugin[trl]'")
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


def what_the_flag_says() -> Diagnosis:
    """The variable as it is set now; a failure if a run would refuse it."""
    said = f"{flag.FLAG}={os.environ[flag.FLAG]!r}"
    try:
        if flag.turned_off():
            return Diagnosis("trl flag", "ok", f"{said}: off")
        given = flag.options().model_dump(exclude_unset=True)
    except (SpecConfigError, ValueError) as error:  # ValueError: a quotation mark without its other
        return Diagnosis(
            "trl flag", "fail", f"{said}: {error}", "`spec-plugin options` lists names, defaults and bounds"
        )
    options = ", ".join(f"{name}={value}" for name, value in given.items())
    detail = f"{said}: {options or 'all options at their defaults'}; by itself it turns nothing on"
    return Diagnosis("trl flag", "note", detail, f"a run has the flag by {_LAUNCHER}, or spec_plugin_trl.enable()")


DOCTOR = AdapterDoctor(
    trainer="trl",
    distributions={"trl": _TRL, "accelerate": "pip install accelerate"},
    vllm="trl[vllm]",
    examine=examine,
    on_cpu=on_cpu,
)
