"""What the installed vLLM's sources say, read as text: importing them takes half a minute, and a check takes two seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from draft_training.parsing import nothing_collected, parsed

__all__ = ["folder_of", "nothing_collected", "parsed", "source_of"]


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
