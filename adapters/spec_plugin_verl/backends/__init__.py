"""One room for each backend of verl's actors: how hidden states are harvested there, and who knows what."""

from __future__ import annotations

from typing import Any

#: backend, as verl's registry names it -> module here, whose ``Actor`` is its mix-in
ROOMS = {
    "fsdp": "fsdp",
    "fsdp2": "fsdp",
    "veomni": "fsdp",
    "megatron": "megatron",
}


def mixed(backend: str, engine: type) -> type:
    """The engine class that verl has for a backend, with what the flag adds before it; unchanged where it has that already."""
    from importlib import import_module

    from spec_plugin_verl.actor import SpecActor

    if issubclass(engine, SpecActor):
        return engine
    mixin: Any = import_module(f"{__name__}.{ROOMS[backend]}").Actor
    about = {"__module__": mixin.__module__, "__doc__": f"verl's {engine.__name__}, plus what the flag adds."}
    return type(f"Spec{engine.__name__}", (mixin, engine), about)
