"""Python's own sources, read as data."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


@contextmanager
def nothing_collected() -> Iterator[None]:
    """While something parses Python: no garbage collection.

    A finalizer that parses too, as that of a task whose exception nobody has seen does for its traceback, makes Python 3.11
    count its recursion into the outer parse and end it with SystemError (cpython issue 106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def parsed(text: str) -> ast.Module:
    """The syntax tree of a Python text."""
    with nothing_collected():
        return ast.parse(text)


def lazily(module: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` of a module whose names are imported when they are first used.

    Its imports for type checkers, in ``if TYPE_CHECKING:``, say which names these are and where each lives.

    Args:
        module: its ``__name__``.
        file: its ``__file__``.
    """
    body = parsed(Path(file).read_text(encoding="utf-8")).body
    (block,) = (n.body for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [node for node in block if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, found)
        return found

    return sorted(homes), __getattr__
