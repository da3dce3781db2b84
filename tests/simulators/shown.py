"""What a simulator shows: a table of docs/guards.md or docs/explain/controller.md, and the bounds that do not hold in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: as ``map``, over seeds
Map = Callable[[Callable[[int], Any], Sequence[int]], Iterable[Any]]


@dataclass
class Shown:
    """One table, and what of it does not hold."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def hold(self, ok: bool, what: str) -> None:
        """A bound."""
        if not ok:
            self.broken.append(what)
