"""Right adapters of trainers that do what the plain loop does not: each must pass the kit, alone and together with the others.

``right_adapters:Driver_of__MultiTurn__Filtered`` runs one that does both. Classes are made when they are asked for, of those in
``right_adapters.habits``.
"""

from __future__ import annotations

from typing import Any

from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Trainer

from right_adapters import habits

_KINDS = ("Loop_of__", "Adapter_of__", "Driver_of__")


def __getattr__(name: str) -> Any:
    for kind in _KINDS:
        if name.startswith(kind):
            chosen = name.removeprefix(kind)
            words = chosen.split("__")
            if kind == "Loop_of__":
                return type(name, (*(getattr(habits, word) for word in words), Trainer), {})
            if kind == "Adapter_of__":
                named = (getattr(habits, f"{word}Adapter", None) or getattr(habits, word) for word in words)
                return type(name, (*named, MinimalAdapter), {})
            loop, adapter = (f"{__name__}:{of}{chosen}" for of in _KINDS[:2])
            options: dict[str, Any] = {"__module__": __name__, "loop": loop, "adapter": adapter}
            for word in words:
                for option, value in getattr(habits, word).driver.items():
                    before = options.get(option)
                    options[option] = {**before, **value} if isinstance(before, dict) else value
            return type(name, (habits.HabitsDriver,), options)
    raise AttributeError(name)
