"""Finds the files of runs and reads them: JSON lines, checkpoints' files of all steps so far, TensorBoard's event files."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import chain, dropwhile, islice, pairwise
from pathlib import Path

from spec_plugin.api.errors import SpecPluginError
from spec_plugin.commands.report.formats import MOST_STEPS, LogFormat, step_in, step_number
from spec_plugin.commands.report.run import LoggedRun, spacing
from spec_plugin.plan.text_files import lines_of, text_of

Steps = dict[int, dict[str, float]]
_CONSOLE = (".log", ".out", ".txt", ".log.gz", ".out.gz", ".txt.gz")
_DEPTH = 3  # folders below the one that was named
_HEADER = 20  # lines within which the first step stands, behind what a logger writes at its start
#: what is raised by compressed data that was cut off or is none, and by a file without end
_BROKEN = (EOFError, zlib.error, OSError)
_SPEC = re.compile(r"(?:^|/)(spec/.+)$")
#: names of times, but for what is a difference of two
_TIME = re.compile(r"(?:^|/)(?!saved|net)\w*(?:_s|_ms|ms_per_token)$")


class ReportError(SpecPluginError, ValueError):
    """Nothing can be reported of what was named; the message is one line for a person."""


@dataclass
class Source:
    """Files of one kind, oldest first, that hold a run's steps; and what was read of them, under the trainer's names."""

    name: str  # of the run
    files: list[Path] = field(default_factory=list)
    steps: Steps = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    planned: int | None = None


def read_runs(path: Path, formats: Sequence[LogFormat]) -> list[LoggedRun]:
    """The runs in a file or folder.

    Of JSON lines each file is a run, of checkpoints those in one folder, of event files those in one folder. Where a folder of
    checkpoints has event files as well, in it or below, the run is read from what has the most steps.

    Raises:
        ReportError: if there is no such path, or nothing to read in it.
    """
    if not path.exists():
        raise ReportError(f"{path}: there is no such file or folder")
    if path.is_file():
        home, kind = _kind_of(path, formats) or (path.parent, "json" if ".jsonl" in path.suffixes else "")
        if not kind:
            what = (
                "a console log, of which the report reads none" if path.name.endswith(_CONSOLE) else "no file of steps"
            )
            raise ReportError(f"{path} is {what}. {_accepted(formats)}")
        stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
        name = stem if kind == "json" and stem != "metrics" else home.resolve().name
        return [_logged(_read(Source(name, [path]), kind, formats), formats)]
    sources, logs = _sources(path, formats)
    if not sources:
        also = f", and of the console log {logs[0]} the report reads nothing" if logs else ""
        raise ReportError(f"{path}: no trainer's file of steps is in this folder{also}. {_accepted(formats)}")
    read = {home: _read(source, home[0], formats) for home, source in sources.items()}
    for kind, home in sources:
        above = next((at for at in [home, *home.parents] if ("state", at) in read), None)
        if kind == "events" and above:
            state, events = read["state", above], read.pop((kind, home))
            if len(events.steps) > len(state.steps):
                read["state", above] = replace(events, name=state.name, planned=state.planned)
    known = [source for source in read.values() if source.steps]
    return [_logged(source, formats) for source in known or list(read.values())[:1]]


def _accepted(formats: Iterable[LogFormat]) -> str:
    states = [f"{form.state_file.name} of checkpoints" for form in formats if form.state_file]
    kinds = ", ".join(["JSON lines of steps (*.jsonl)", *states, "TensorBoard's event files"])
    options = "; ".join(sorted((f"{form.trainer}: {form.option}" for form in formats), key=str.lower))
    return f"It reads {kinds}. To have them written: {options}"


def _kind_of(file: Path, formats: Sequence[LogFormat]) -> tuple[Path, str] | None:
    """The folder of a file's run, and the kind of file, by its name and, of JSON lines, the first of them; None for all else."""
    if "tfevents" in file.name:
        return file.parent, "events"
    for state in (form.state_file for form in formats if form.state_file and form.state_file.name == file.name):
        return file.parent.parent if fnmatch(file.parent.name, state.folders) else file.parent, "state"
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        return None
    try:  # other JSON lines are prompts or rollouts; an empty file may become steps
        first = list(islice(lines_of(file), _HEADER))
        return (file.parent, "json") if not first or any(step_in(_parsed(line), formats) for line in first) else None
    except _BROKEN:
        return file.parent, "json"  # the reader says so


def _sources(top: Path, formats: Sequence[LogFormat]) -> tuple[dict[tuple[str, Path], Source], list[str]]:
    """By kind and place what is in a folder; and its console logs."""
    found: dict[tuple[str, Path], Source] = {}
    logs: list[str] = []
    for name, below, files in os.walk(top):
        if len(Path(name).relative_to(top).parts) >= _DEPTH:
            below.clear()
        for file in filter(Path.is_file, map(Path(name).joinpath, files)):
            if known := _kind_of(file, formats):
                home, kind = known if file.parent != top else (top, known[1])
                place = file if kind == "json" and file.name != "metrics.jsonl" else home
                title = top.resolve().name if place == top else str(place.relative_to(top))
                found.setdefault((kind, place), Source(title)).files.append(file)
            elif file.name.endswith(_CONSOLE):
                logs.append(str(file))
    return dict(sorted(found.items(), key=lambda item: item[0][1])), logs


def _read(source: Source, kind: str, formats: Sequence[LogFormat]) -> Source:
    """All files, the later ones after the earlier; whatever cannot be read is a remark."""
    by_time = sorted(source.files, key=lambda file: (file.stat().st_mtime, _number_of(file)))
    # a checkpoint holds all steps before it; a copy may have lost its time, a resumed run be behind an older one
    kept = {by_time[-1], *sorted(by_time, key=_number_of)[-2:]}
    source.files = [file for file in by_time if kind != "state" or file in kept]
    reader: Callable[[Path, Sequence[LogFormat], Source], Iterator[tuple[int, dict[str, float]]]]
    reader = {"events": _events, "state": _state}.get(kind, _json_lines)
    for file in source.files:
        if file.stat().st_size == 0:
            text = f"{file.name} is empty: the run has written nothing yet, or died before its first step"
            source.remarks.append(text)
            continue
        last = max(source.steps, default=-1)
        for step, metrics in dropwhile(lambda s: source.steps.get(s[0]) == s[1], reader(file, formats, source)):
            if step < last and step in source.steps:
                text = f"step {step} comes again after step {last}: the run was resumed there; the later one is shown"
                source.remarks.append(f"{file.name}: {text}")
                source.steps = {s: values for s, values in source.steps.items() if s < step}
            last = step
            source.steps.setdefault(step, {}).update(metrics)
    return source


def _number_of(file: Path) -> tuple[int, str]:
    """Checkpoints by their numbers, as ``checkpoint-9`` and ``checkpoint-10``; all else by name."""
    digits = re.findall(r"\d+", file.parent.name)
    return (int(digits[-1]) if digits else 0, file.name)


def _state(file: Path, formats: Sequence[LogFormat], source: Source) -> Iterator[tuple[int, dict[str, float]]]:
    """A checkpoint's file of all steps so far, as an adapter's ``state_file`` says."""
    try:
        content = json.loads(text_of(file))
    except (ValueError, RecursionError) as error:  # also what text_of raises
        where = f"{file.parent.name}/{file.name}"
        source.remarks.append(f"{where}: it is no JSON, or was cut off while it was written: {error}")
        return
    for keys in (form.state_file for form in formats if form.state_file and isinstance(content, dict)):
        records = content.get(keys.steps)
        source.planned = step_number(content.get(keys.planned)) or source.planned
        yield from filter(
            None, (step_in(r, formats, texts=True) for r in (records if isinstance(records, list) else ()))
        )


def _json_lines(file: Path, formats: Sequence[LogFormat], source: Source) -> Iterator[tuple[int, dict[str, float]]]:
    """One object a line, whose keys an adapter's ``json_lines`` names; what is no step is counted."""
    broken, number, line = list[int](), 0, "\n"
    try:
        for number, line in enumerate(lines_of(file), 1):
            if step := step_in(_parsed(line), formats):
                yield step
            elif line.strip():
                broken.append(number)
    except _BROKEN as error:
        source.remarks.append(f"{file.name}: it is broken or cut off, and was read up to there: {error}")
    if broken[-1:] == [number] and not line.endswith("\n"):
        source.remarks.append(f"{file.name}: its last line, {broken.pop()}, is cut off in the middle and was left out")
    if broken:
        source.remarks.append(f"{file.name}: {len(broken)} of its lines hold no step, the first is line {broken[0]}")


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _events(file: Path, formats: Sequence[LogFormat], source: Source) -> Iterator[tuple[int, dict[str, float]]]:
    """TensorBoard's event file, which has an event for each number of a step.

    Its own reader would check sums byte by byte in Python: half a minute for a thousand steps.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        text = f"event files are read with tensorboard, which is not installed here ({error}): pip install 'spec-plugin[report]'"
        raise ReportError(f"{file}: {text}") from error
    step, metrics = -1, dict[str, float]()
    try:
        for event in map(Event.FromString, _records(file)):
            if metrics and event.step != step:
                yield step, metrics
                metrics = {}
            if abs(event.step) <= MOST_STEPS:
                step = int(event.step)
                metrics.update((v.tag, v.simple_value) for v in event.summary.value if v.HasField("simple_value"))
    except (DecodeError, EOFError):
        source.remarks.append(
            f"{file.name}: a record after step {step} is broken or cut off, and it was read up to there"
        )
    if metrics:
        yield step, metrics


def _records(file: Path) -> Iterator[bytes]:
    """Of a TFRecord file: the length in 8 bytes, 4 of its check sum, the data, 4 of theirs; EOFError if one is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        while header := stream.read(12):
            length = int.from_bytes(header[:8], "little")
            data = stream.read(length + 4) if length < size else b""
            if len(header) < 12 or len(data) < length + 4:
                raise EOFError
            yield data[:length]


def _logged(source: Source, formats: Sequence[LogFormat]) -> LoggedRun:
    """What was read under the report's names; ReportError if it is no step."""
    names = {name: 0.0 for metrics in source.steps.values() for name in metrics}
    if not names:
        where = ", ".join(map(str, source.files[:3]))
        raise ReportError(f"{where}: no step of a trainer is in it: {'; '.join(source.remarks) or _accepted(formats)}")
    trainer = max(formats, key=lambda form: len(form.own_names(names)), default=None)
    trainer = trainer if trainer and trainer.own_names(names) else None
    known = {step: _canonical(metrics, trainer) for step, metrics in source.steps.items()}
    known = {step: values for step, values in known.items() if values} or {step: {} for step in source.steps}
    remarks = (*source.remarks, *_wrong_numbers(known), *_missing(sorted(known), source.planned))
    title = trainer.trainer if trainer else ""
    return LoggedRun(source.name, title, known, remarks, tuple(map(str, source.files)), source.planned)


def _canonical(metrics: Mapping[str, float], trainer: LogFormat | None) -> dict[str, float]:
    """The plugin's metrics without the trainer's prefix, and the trainer's own under the report's names."""
    values = trainer.own_names(metrics) if trainer else {}
    tokens = values.get("response_tokens", 0.0) * values.get("samples", 0.0)
    if "generation_s" in values and tokens > 0:
        values.setdefault("ms_per_token", 1e3 * values["generation_s"] / tokens)
    return values | {found[1]: value for name, value in metrics.items() if (found := _SPEC.search(name))}


def _wrong_numbers(steps: Steps) -> Iterator[str]:
    """Takes out what cannot be, and says it."""
    wrong: dict[str, list[int]] = {}
    for step, values in sorted(steps.items()):
        for name, value in list(values.items()):
            if not math.isfinite(value) or (value < 0.0 and _TIME.search(name)):
                why = "a time below zero" if math.isfinite(value) else "not a finite number"
                wrong.setdefault(f"{name} is {why}", []).append(step)
                del values[name]
    for what, where in wrong.items():
        yield f"{what} at step{'s' * (len(where) > 1)} {', '.join(map(str, where[:8]))}"


def _missing(numbers: Sequence[int], planned: int | None) -> Iterator[str]:
    """Steps in between and at the end. Some trainers log each tenth step, say."""
    every = spacing(numbers)
    gaps = chain.from_iterable(range(before + every, after, every) for before, after in pairwise(numbers))
    if missing := list(islice(gaps, 8)):
        yield f"steps are missing between the first and the last: {', '.join(map(str, missing))}"
    if planned and planned - numbers[-1] >= every:
        yield f"{planned} steps were planned, and the log ends at step {numbers[-1]}: it is still running, or was cut off"
