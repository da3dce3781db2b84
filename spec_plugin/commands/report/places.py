"""Where a run has written: turns what a person named, a file or a folder, into the files of one run or of several."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from spec_plugin.commands.report.formats import LogFormat
from spec_plugin.errors import SpecPluginError
from spec_plugin.outside import TooMuchError, lines_of

Kind = Literal["json", "state", "events", "console"]
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
    files: Mapping[Path, Kind]


def find_places(path: Path, formats: Sequence[LogFormat]) -> list[Place]:
    """The runs in a file or folder.

    A folder with files of its own is one run, but for JSON lines, of which each file is one (named by experiment). Else
    each folder below with such files is one; together they are one run if no two of them hold the same kind. What lies in a
    checkpoint is of the run of the folder above it.

    Args:
        path: the file or folder.
        formats: what trainers write.

    Raises:
        ReportError: if there is no such path, or nothing to read in it.
    """
    if not path.exists():
        raise ReportError(f"{path}: there is no such file or folder")
    if path.is_file():
        kind = kind_of(path, formats) or "console"
        return [Place(_name_of(path, kind, formats), {path: kind})]
    folders = _folders_of_runs(path, formats)
    if not folders:
        states = "".join(f"{form.state_file.name} in checkpoints, nor " for form in formats if form.state_file)
        raise ReportError(
            f"{path}: no trainer's output is in this folder: neither JSON lines of steps (*.jsonl), nor {states}"
            f"tensorboard's event files, nor a console log ({', '.join('*' + s for s in _CONSOLE)}), nor one of these "
            f"as *{_PACKED}; name the file that it went to"
        )
    name = path.resolve().name
    if path in folders:
        return _split(name, _with_folders_below(path, folders))
    holders = Counter(kind for files in folders.values() for kind in set(files.values()))
    if max(holders.values()) == 1:
        return _split(name, {file: kind for files in folders.values() for file, kind in files.items()})
    whole = {folder: _with_folders_below(folder, folders) for folder in folders}
    taken = {file for folder, files in whole.items() for file in files if file not in folders[folder]}
    runs = {folder: files for folder, files in whole.items() if not taken.issuperset(folders[folder])}
    return [p for folder, files in runs.items() for p in _split(str(folder.relative_to(path)), files)]


def _name_of(file: Path, kind: Kind, formats: Sequence[LogFormat]) -> str:
    """What a run is called of which one file was named: by the folder, where the file is called the same in every run."""
    folder, stem = file.resolve().parent, _unpacked(file).stem
    if kind == "state":
        return folder.parent.name if any(form.is_checkpoint(folder) for form in formats) else folder.name
    return folder.name if stem == "metrics" else stem


def kind_of(file: Path, formats: Sequence[LogFormat]) -> Kind | None:
    """By the file's name and, of JSON lines, its first lines; None if it is nothing that is read here."""
    if "tfevents" in file.name and file.suffix != _PACKED:
        return "events"
    inner_file = _unpacked(file)
    if any(form.is_state_file(inner_file) for form in formats):
        return "state"
    if inner_file.suffix == ".jsonl":
        return "json" if _has_steps(file, formats) else None
    return "console" if inner_file.suffix in _CONSOLE else None


def _unpacked(file: Path) -> Path:
    """Its name without that of the compression."""
    return file.with_suffix("") if file.suffix == _PACKED else file


def _has_steps(file: Path, formats: Sequence[LogFormat]) -> bool:
    """Is one of the first lines a step's. An empty file may become one; other JSON lines are prompts or rollouts."""
    try:
        first = [line for line in islice(lines_of(file), _HEADER) if line.strip()]
    except (*BROKEN, TooMuchError):
        return True  # the reader says so
    return not first or any(_is_step(line, formats) for line in first)


def _is_step(line: str, formats: Sequence[LogFormat]) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return '"step"' in line[:200]  # cut off
    if not isinstance(record, dict):
        return False
    return ("step" in record and len(record) <= 3) or any(form.metrics_in(record) is not None for form in formats)


def _folders_of_runs(top: Path, formats: Sequence[LogFormat]) -> dict[Path, dict[Path, Kind]]:
    """Each folder with a trainer's files, oldest first, so that what a resumed run has written comes last."""
    found: dict[Path, dict[Path, Kind]] = {}
    for name, below, files in os.walk(top):
        folder = Path(name)
        if len(folder.relative_to(top).parts) >= _DEPTH:
            below.clear()
        of_above = folder != top and any(form.is_checkpoint(folder) for form in formats)
        for file in map(folder.joinpath, files):
            if file.is_file() and (kind := kind_of(file, formats)):
                found.setdefault(folder.parent if of_above and kind == "state" else folder, {})[file] = kind
    return {folder: _in_order(files) for folder, files in sorted(found.items())}


def _in_order(files: Mapping[Path, Kind]) -> dict[Path, Kind]:
    states = [file for file, kind in files.items() if kind == "state"]
    kept = [file for file in files if file not in states] + _newest(states)
    return {file: files[file] for file in sorted(kept, key=lambda file: (file.stat().st_mtime, _place_in_run(file)))}


def _newest(states: list[Path]) -> list[Path]:
    """Each holds all steps before it. A copy may have lost its time, a resumed run is behind an older one, one may be torn."""
    by_time = sorted(states, key=lambda file: file.stat().st_mtime)
    return list(dict.fromkeys([*by_time[-1:], *sorted(states, key=_place_in_run)[-2:]]))


def _place_in_run(file: Path) -> tuple[int, str]:
    """Checkpoints by their numbers, as ``checkpoint-9`` and ``checkpoint-10``; all else by name."""
    digits = re.findall(r"\d+", file.parent.name)
    return (int(digits[-1]) if digits else 0, file.name)


def _with_folders_below(folder: Path, folders: Mapping[Path, Mapping[Path, Kind]]) -> dict[Path, Kind]:
    """A run's own files, and its event files and checkpoints in a folder below; where several have such, they are other runs."""
    files = dict(folders[folder])
    below = [others for other, others in folders.items() if folder in other.parents]
    kinds: tuple[Kind, ...] = ("events", "state")
    for kind in kinds:
        holders = [others for others in below if kind in others.values()]
        if kind not in files.values() and len(holders) == 1:
            files |= {file: kind for file, its in holders[0].items() if its == kind}
    return files


def _split(name: str, files: Mapping[Path, Kind]) -> list[Place]:
    steps = [file for file, kind in files.items() if kind == "json"]
    if len(steps) < 2:
        return [Place(name, files)]
    return [Place(f"{name}/{file.stem}", {file: "json"}) for file in steps]
