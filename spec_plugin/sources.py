"""What the installed vLLM's sources say, read as text: importing them takes half a minute, and a check takes two seconds."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str) -> Path | None:
    """Where an installed package lies, which is not imported; None where it is not installed."""
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def source_of(package: str, file: str) -> str:
    """The text of a file of an installed package, which is not imported; empty where there is none."""
    folder = folder_of(package)
    path = folder / file if folder else None
    return path.read_text() if path and path.is_file() else ""


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
