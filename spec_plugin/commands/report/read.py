"""Reads what trainers write of a run: JSON lines, tensorboard's event files and the console log, each as far as it goes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from spec_plugin.commands.report.console import read_console
from spec_plugin.commands.report.formats import LogFormat
from spec_plugin.commands.report.numbers import MOST_STEPS, numbers_of, step_number
from spec_plugin.commands.report.places import BROKEN, Kind, Place, ReportError
from spec_plugin.commands.report.raw import Raw
from spec_plugin.commands.report.run import LoggedRun, Notice, spacing
from spec_plugin.outside import TooMuchError, lines_of, text_of

_SPEC = re.compile(r"(?:^|/)(spec/.+)$")
#: names of times, but for what is a difference of two
_TIME = re.compile(r"(?:^|/)(?!saved|net)\w*(?:_s|_ms|ms_per_token)$")


def read_place(place: Place, formats: Sequence[LogFormat]) -> LoggedRun:
    """One run from its files.

    Where several hold the same step, JSON is preferred to event files (which round to 32 bits), and these to the log.

    Raises:
        ReportError: if no step is in any of them, with what was found instead.
    """
    kinds: dict[Kind, Raw] = {"console": Raw(), "events": Raw(), "state": Raw(), "json": Raw()}
    for file, kind in sorted(place.files.items(), key=lambda of: of[1] == "console"):  # these come last
        per_epoch = _per_epoch(kinds, formats) if kind == "console" else None
        kinds[kind].go_on(_read_file(file, kind, formats, per_epoch), file)
    remarks = [remark for raw in kinds.values() for remark in raw.remarks]
    notices = tuple(notice for raw in kinds.values() for notice in raw.notices)
    names = {name: 0.0 for raw in kinds.values() for metrics in raw.steps.values() for name in metrics}
    if not names:
        raise ReportError(_nothing(place, remarks, notices, formats))
    trainer = max(formats, key=lambda form: len(form.own_names(names)), default=None)
    known: dict[int, dict[str, float]] = {}
    for raw in kinds.values():
        for step, metrics in raw.steps.items():
            known.setdefault(step, {}).update(_canonical(metrics, trainer))
    known = {step: _with_per_token(values) for step, values in known.items() if values} or {s: {} for s in known}
    planned = kinds["state"].planned or kinds["console"].planned
    remarks += [*_not_numbers(known), *_cut_off(known, planned)]
    finite = {s: {n: v for n, v in values.items() if not _wrong(n, v)} for s, values in known.items()}
    title = trainer.trainer if trainer and trainer.own_names(names) else ""
    return LoggedRun(place.name, title, finite, notices, tuple(remarks), tuple(map(str, place.files)), planned)


def _per_epoch(kinds: Mapping[Kind, Raw], formats: Sequence[LogFormat]) -> float | None:
    """Steps in an epoch, by files that number their steps; None if none of them has both."""
    for raw in kinds.values():
        for step, metrics in sorted(raw.steps.items(), reverse=True):
            for form in formats:
                if epoch := form.epoch_of(metrics):
                    return step / epoch
    return None


def _read_file(file: Path, kind: Kind, formats: Sequence[LogFormat], per_epoch: float | None) -> Raw:
    """One file, by its kind; whatever cannot be read in it is a remark."""
    if file.stat().st_size == 0:
        return Raw(remarks=[f"{file.name} is empty: the run has written nothing yet, or died before its first step"])
    if kind == "events":
        return _read_events(file)
    if kind == "state":
        return _read_state(file, formats)
    broken: list[str] = []
    lines = _lines_of(file, broken)
    raw = _read_json_lines(lines, file, formats) if kind == "json" else read_console(lines, file, formats, per_epoch)
    raw.remarks += broken
    return raw


def _read_state(file: Path, formats: Sequence[LogFormat]) -> Raw:
    """A checkpoint's file of all steps so far, as an adapter's ``state_file`` says."""
    raw, where = Raw(), f"{file.parent.name}/{file.name}"
    try:
        content = json.loads(text_of(file))
    except (ValueError, RecursionError) as error:  # also what text_of raises
        raw.remarks.append(f"{where}: it is no JSON, or was cut off while it was written: {error}")
        return raw
    for form in formats:
        keys = form.state_file
        records = content.get(keys.steps) if keys and isinstance(content, dict) else None
        if not keys or not isinstance(records, list):
            continue
        for record in records:
            if isinstance(record, dict) and (step := step_number(record.get(keys.step))) is not None:
                metrics = numbers_of(record, keys.step)
                if form.own_names(metrics):
                    raw.add(step, metrics, file)
        raw.planned = step_number(content.get(keys.planned or "")) or None
    return raw


def _lines_of(file: Path, broken: list[str]) -> Iterator[str]:
    """The lines, as far as it can be unpacked; a sentence in ``broken`` if it ends before its end."""
    try:
        yield from lines_of(file)
    except TooMuchError as error:
        broken.append(f"{file.name}: {error}; it was read up to there")
    except BROKEN as error:
        broken.append(f"{file.name}: its compressed data is broken or cut off, and it was read up to there: {error}")


def _read_json_lines(lines: Iterable[str], file: Path, formats: Sequence[LogFormat]) -> Raw:
    """One object a line, whose keys an adapter's ``json_lines`` names."""
    raw, broken = Raw(), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step, metrics = _record(json.loads(line), formats)
        except (ValueError, TypeError, OverflowError, RecursionError):
            broken.append((number, line.endswith("\n")))
            continue
        raw.add(step, metrics, file)
    if broken and not broken[-1][1]:
        raw.remarks.append(f"{file.name}: its last line, {broken.pop()[0]}, is cut off in the middle and was left out")
    if broken:
        raw.remarks.append(f"{file.name}: {len(broken)} of its lines hold no step, the first is line {broken[0][0]}")
    return raw


def _record(record: Any, formats: Sequence[LogFormat]) -> tuple[int, Mapping[str, float]]:
    """A step's number and its metrics; ValueError, TypeError or OverflowError if it is none."""
    if not isinstance(record, dict):
        raise ValueError("no step")
    for form in formats:
        if (keys := form.json_lines) and (metrics := form.metrics_in(record)) is not None:
            step = int(record[keys.step])
            if abs(step) > MOST_STEPS:
                raise ValueError(f"no run comes to step {step}")
            return step, metrics
    raise ValueError("no step")


def _read_events(file: Path) -> Raw:
    """Tensorboard's event file; what is left of a record that was cut off is left out.

    Tensorboard's own reader would check sums byte by byte in Python: half a minute for a thousand steps.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise ReportError(
            f"{file}: event files are read with tensorboard, which is not installed here ({error}): "
            "pip install 'spec-plugin[report]', or name the console log instead"
        ) from error
    raw = Raw()
    try:
        for record in _records(file):
            event = Event.FromString(record)
            found = {v.tag: float(v.simple_value) for v in event.summary.value if v.HasField("simple_value")}
            if found and abs(event.step) <= MOST_STEPS:
                raw.add(int(event.step), found, file)
    except (DecodeError, EOFError):
        raw.remarks.append(
            f"{file.name}: a record after step {raw.last} is broken or cut off, and it was read up to there"
        )
    return raw


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


def _canonical(metrics: Mapping[str, float], trainer: LogFormat | None) -> dict[str, float]:
    """The plugin's metrics without the trainer's prefix, and the trainer's own under the report's names."""
    ours = {found[1]: value for name, value in metrics.items() if (found := _SPEC.search(name))}
    return (trainer.own_names(metrics) if trainer else {}) | ours


def _with_per_token(values: dict[str, float]) -> dict[str, float]:
    """With the time of generation per token, where the trainer does not log it."""
    if "ms_per_token" in values or not {"generation_s", "response_tokens", "samples"} <= values.keys():
        return values
    tokens = values["response_tokens"] * values["samples"]
    return values | {"ms_per_token": 1e3 * values["generation_s"] / tokens} if tokens > 0 else values


def _wrong(name: str, value: float) -> str:
    """What is wrong with a metric, in words; empty: nothing."""
    if not math.isfinite(value):
        return "not a finite number"
    return "a time below zero" if value < 0.0 and _TIME.search(name) else ""


def _not_numbers(steps: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    wrong: dict[tuple[str, str], list[int]] = {}
    for step, values in sorted(steps.items()):
        for name, value in values.items():
            if why := _wrong(name, value):
                wrong.setdefault((name, why), []).append(step)
    for (name, why), where in wrong.items():
        yield f"{name} is {why} at step{'s' * (len(where) > 1)} {', '.join(map(str, where[:8]))}"


def _cut_off(steps: Mapping[int, Mapping[str, float]], planned: int | None) -> Iterator[str]:
    """What is missing: steps in between, at the end, or metrics of the last one. Some trainers log each tenth step, say."""
    numbers = sorted(steps)
    every = spacing(numbers)
    gaps = chain.from_iterable(range(before + every, after, every) for before, after in pairwise(numbers))
    if missing := list(islice(gaps, 8)):
        yield f"steps are missing between the first and the last: {', '.join(map(str, missing))}"
    if planned and planned - numbers[-1] >= every:
        yield f"{planned} steps were planned, and the log ends at step {numbers[-1]}: it is still running, or was cut off"
    last, before = (len(steps[number]) for number in (numbers[-1], numbers[max(0, len(numbers) - 2)]))
    if last < before / 2:
        yield f"step {numbers[-1]} has {last} metrics where the one before has {before}: it was cut off"


def _nothing(place: Place, remarks: Sequence[str], notices: Sequence[Notice], formats: Sequence[LogFormat]) -> str:
    """Why there is no step, in a sentence."""
    where = ", ".join(str(file) for file in islice(place.files, 3))
    if stopped := [notice for notice in notices if notice.level == "ERROR"]:
        return f"{where}: the run was stopped before its first step: {stopped[0].text}"
    if remarks:
        return f"{where}: no step of a trainer is in it: {'; '.join(remarks)}"
    if not formats:
        return f"{where}: no adapter that is installed here says how its trainer writes down steps (log.json in its package)"
    trainers = " or ".join(sorted((form.trainer for form in formats), key=str.lower))
    return (
        f"{where}: no step of {trainers} is in it, neither as JSON, nor in event files, nor in lines of a console log"
    )
