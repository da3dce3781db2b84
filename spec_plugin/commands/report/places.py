"""Where a run has written: turns what a person named, a file or a folder, into the files of one run or of several."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from spec_plugin.errors import SpecPluginError
from spec_plugin.outside import TooMuchError, lines_of

Kind = Literal["json", "events", "console"]
_CONSOLE = (".log", ".out")  # looked for in folders; a file that was named may be called anything
_DEPTH = 3  # folders below the one that was named
_PACKED = ".gz"
#: what is raised by compressed data that was cut off, or is none
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile)
#: lines within which the first step stands, behind what a logger writes at its start
_HEADER = 20


class ReportError(SpecPluginError, ValueError):
    """Nothing can be reported of what was named; the message is one sentence for a person."""


@dataclass(frozen=True)
class Place:
    """One run: its name and the files that it wrote, oldest first."""

    name: str
    files: tuple[Path, ...]


def find_places(path: Path) -> list[Place]:
    """The runs in a file or folder.

    A folder with files of its own is one run, but for JSON lines, of which each file is one (named by experiment). Else
    each folder below with such files is one; together they are one run if no two of them hold the same kind.

    Raises:
        ReportError: if there is no such path, or nothing to read in it.
    """
    if not path.exists():
        raise ReportError(f"{path}: there is no such file or folder")
    if path.is_file():
        stem = _unpacked(path).stem
        return [Place(path.resolve().parent.name if stem == "metrics" else stem, (path,))]
    folders = {folder: files for folder in _folders(path) if (files := _files(folder))}
    if not folders:
        raise ReportError(
            f"{path}: no trainer's output is in this folder: neither JSON lines of steps (*.jsonl), nor tensorboard's "
            f"event files, nor a console log ({', '.join('*' + s for s in _CONSOLE)}), nor one of these as *{_PACKED}; "
            "name the file that it went to"
        )
    name = path.resolve().name
    if path in folders:
        mine = folders.pop(path)
        return _split(name, mine + _events_of_one_folder(mine, folders))
    holders = Counter(kind for files in folders.values() for kind in {kind_of(file) for file in files})
    if max(holders.values()) == 1:
        return _split(name, [file for files in folders.values() for file in files])
    return [p for folder, files in folders.items() for p in _split(str(folder.relative_to(path)), files)]


def kind_of(file: Path) -> Kind | None:
    """By the file's name and, of JSON lines, its first lines; None if it is nothing that is read here."""
    if "tfevents" in file.name and file.suffix != _PACKED:
        return "events"
    inner_file = _unpacked(file)
    if inner_file.suffix == ".jsonl":
        return "json" if _has_steps(file) else None
    return "console" if inner_file.suffix in _CONSOLE else None


def _unpacked(file: Path) -> Path:
    """Its name without that of the compression."""
    return file.with_suffix("") if file.suffix == _PACKED else file


def _has_steps(file: Path) -> bool:
    """Is one of the first lines a step's. An empty file may become one; other JSON lines are prompts or rollouts."""
    try:
        first = [line for line in islice(lines_of(file), _HEADER) if line.strip()]
    except (*BROKEN, TooMuchError):
        return True  # the reader says so
    return not first or any(map(_is_step, first))


def _is_step(line: str) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return '"step"' in line[:200]  # cut off
    return isinstance(record, dict) and "step" in record and len(record) <= 3


def _folders(top: Path) -> Iterator[Path]:
    for folder, below, _ in os.walk(top):
        if len(Path(folder).relative_to(top).parts) >= _DEPTH:
            below.clear()
        below.sort()
        yield Path(folder)


def _files(folder: Path) -> list[Path]:
    """Oldest first, so that what a resumed run has written comes last."""
    files = [file for file in folder.iterdir() if file.is_file() and kind_of(file)]
    return sorted(files, key=lambda file: (file.stat().st_mtime, file.name))


def _events_of_one_folder(mine: list[Path], below: dict[Path, list[Path]]) -> list[Path]:
    """Event files of a run lie in a folder of their own, beside its log."""
    if any(kind_of(file) == "events" for file in mine):
        return []
    found = [events for files in below.values() if (events := [f for f in files if kind_of(f) == "events"])]
    return found[0] if len(found) == 1 else []


def _split(name: str, files: list[Path]) -> list[Place]:
    steps = [file for file in files if kind_of(file) == "json"]
    if len(steps) < 2:
        return [Place(name, tuple(files))]
    return [Place(f"{name}/{file.stem}", (file,)) for file in steps]
