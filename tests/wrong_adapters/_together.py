"""Several wrong adapters in one: ``_together:Driver_of__plain_claimed__metrics_dropped`` makes both mistakes in one run.

Classes are made when they are asked for. Those of the modules are inherited in that order, so mistakes in the same method
belong together only where the first one calls the next.
"""

from __future__ import annotations

import importlib
from typing import Any

_DRIVER, _ADAPTER = "Driver_of__", "Adapter_of__"


def _classes(names: list[str], wanted: str) -> tuple[type, ...]:
    found = [getattr(importlib.import_module(f"wrong_adapters.{name}"), wanted) for name in names]
    # one that others inherit from would stand before them
    return tuple(c for c in found if not any(issubclass(other, c) for other in found if other is not c))


def __getattr__(name: str) -> Any:
    for prefix, wanted in ((_DRIVER, "Driver"), (_ADAPTER, "Adapter")):
        if name.startswith(prefix):
            names = name.removeprefix(prefix).split("__")
            bases = _classes(names, wanted)
            links = {base.link_type: None for base in bases if hasattr(base, "link_type")}
            more: dict[str, Any] = {"__module__": __name__}
            if wanted == "Driver":
                more["adapter"] = f"{__name__}:{_ADAPTER}{'__'.join(names)}"
            elif len(links) > 1:
                links = {link: None for link in links if not any(issubclass(o, link) for o in links if o is not link)}
                more["link_type"] = type("Link", tuple(links), {})
            return type(name, bases, more)
    raise AttributeError(name)
