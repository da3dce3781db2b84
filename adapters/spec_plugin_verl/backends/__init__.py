"""Mix-ins for verl's actors, one module for each kind of backend: how hidden states are harvested, and which rank knows what."""

from __future__ import annotations

from typing import Any

#: backend, as verl's registry names it -> module:class here of its mix-in
BACKENDS = {
    "fsdp": "fsdp:FsdpActor",
    "fsdp2": "fsdp:FsdpActor",
    "veomni": "fsdp:FsdpActor",
    "megatron": "megatron:MegatronActor",
}


def mixed(backend: str, engine: type) -> type:
    """The engine class that verl has for a backend, with what the flag adds before it; unchanged where it has that already."""
    from importlib import import_module

    from spec_plugin_verl.actor import SpecActor

    if issubclass(engine, SpecActor):
        return engine
    module, name = BACKENDS[backend].split(":")
    mixin: Any = getattr(import_module(f"{__name__}.{module}"), name)
    about = {"__module__": mixin.__module__, "__doc__": f"verl's {engine.__name__}, plus what the flag adds."}
    return type(f"Spec{engine.__name__}", (mixin, engine), about)
