"""Reads what trainers write of a run: JSON lines, tensorboard's event files and the console log, each as far as it goes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from spec_plugin.commands.report.formats import LogFormat
from spec_plugin.commands.report.places import BROKEN, Place, ReportError, kind_of
from spec_plugin.commands.report.run import LoggedRun, Notice
from spec_plugin.errors import FATAL
from spec_plugin.outside import TooMuchError, lines_of

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_RAY_PREFIX = re.compile(r"(?:\x1b\[[\d;]*m)*\((?:\w+ )?pid=[^)]*\)(?:\x1b\[[\d;]*m)* ?")
_OURS = " spec-plugin: "
_NOTICE = re.compile(rf"\b(INFO|WARNING|ERROR) \d{{4}}-\d\d-\d\d [\d:,]+{_OURS}(.*)")
_STOPPED = re.compile(rf"^(?:spec_plugin\.errors\.)?({'|'.join(error.__name__ for error in FATAL)}): (.*)")
_LINES_OF_A_NOTICE = 8
#: no run comes to this step; a number beyond it is a time, or no step at all
_MOST_STEPS = 1_000_000
_DIGITS = len(str(_MOST_STEPS)) - 1
#: as which "not a number" and the infinities are written by loggers that keep to JSON, in small letters
_NO_NUMBERS = ("nan", "infinity", "-infinity", "inf", "-inf")
_SPEC = re.compile(r"(?:^|/)(spec/.+)$")


@dataclass
class Raw:
    """What is in one file, under the trainer's names."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    planned: int | None = None
    last: int = -1  # step

    def add(self, step: int, metrics: Mapping[str, float], file: Path) -> None:
        """A step; one that comes again was repeated by a run that went on from a checkpoint."""
        if step < self.last and step in self.steps:
            self.remarks.append(
                f"{file.name}: step {step} comes again after step {self.last}: the run was resumed there; the later one is shown"
            )
            for later in [s for s in self.steps if s >= step]:
                del self.steps[later]
        self.last = step
        self.steps.setdefault(step, {}).update(metrics)

    def go_on(self, later: Raw, file: Path) -> None:
        """What a later file of the same kind has; a copy adds nothing."""
        if not later.steps.items() <= self.steps.items():
            for step, metrics in later.steps.items():
                self.add(step, metrics, file)
        self.notices += later.notices
        self.remarks += later.remarks
        self.planned = later.planned or self.planned


def read_place(place: Place, formats: Sequence[LogFormat]) -> LoggedRun:
    """One run from its files.

    Where several hold the same step, JSON lines are preferred to event files (which round to 32 bits), and these to the log.

    Raises:
        ReportError: if no step is in any of them, with what was found instead.
    """
    kinds: dict[str, Raw] = {"console": Raw(), "events": Raw(), "json": Raw()}
    for file in place.files:
        kinds[kind_of(file) or "console"].go_on(_read_file(file, formats), file)
    steps: dict[int, dict[str, float]] = {}
    for raw in kinds.values():
        for step, metrics in raw.steps.items():
            steps.setdefault(step, {}).update(metrics)
    remarks = [remark for raw in kinds.values() for remark in raw.remarks]
    notices = tuple(notice for raw in kinds.values() for notice in raw.notices)
    if not steps:
        raise ReportError(_nothing(place, remarks, notices, formats))
    names = {name: 0.0 for metrics in steps.values() for name in metrics}
    trainer = max(formats, key=lambda form: len(form.own_names(names)), default=None)
    known = {step: _canonical(metrics, trainer) for step, metrics in steps.items()}
    planned = kinds["console"].planned
    remarks += [*_not_numbers(known), *_cut_off(known, planned)]
    finite = {s: {n: v for n, v in values.items() if math.isfinite(v)} for s, values in known.items()}
    title = trainer.trainer if trainer and trainer.own_names(names) else ""
    return LoggedRun(place.name, title, finite, notices, tuple(remarks), tuple(map(str, place.files)), planned)


def _read_file(file: Path, formats: Sequence[LogFormat]) -> Raw:
    """One file, by its kind; whatever cannot be read in it is a remark."""
    if file.stat().st_size == 0:
        return Raw(remarks=[f"{file.name} is empty: the run has written nothing yet, or died before its first step"])
    kind = kind_of(file)
    if kind == "events":
        return _read_events(file)
    broken: list[str] = []
    lines = _lines_of(file, broken)
    raw = _read_json_lines(lines, file, formats) if kind == "json" else _read_console(lines, file, formats)
    raw.remarks += broken
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
        raw.add(step, {name: value for name, v in metrics.items() if (value := _number(v)) is not None}, file)
    if broken and not broken[-1][1]:
        raw.remarks.append(f"{file.name}: its last line, {broken.pop()[0]}, is cut off in the middle and was left out")
    if broken:
        raw.remarks.append(f"{file.name}: {len(broken)} of its lines hold no step, the first is line {broken[0][0]}")
    return raw


def _record(record: Any, formats: Sequence[LogFormat]) -> tuple[int, Mapping[str, object]]:
    """A step's number and its metrics; ValueError, TypeError or OverflowError if it is none."""
    for form in formats:
        keys = form.json_lines
        if keys and isinstance(record, dict) and isinstance(record.get(keys.metrics), dict):
            step = int(record[keys.step])
            if abs(step) > _MOST_STEPS:
                raise ValueError(f"no run comes to step {step}")
            return step, record[keys.metrics]
    raise ValueError("no step")


def _number(value: object) -> float | None:
    """A metric, also where it is the word for what JSON has no number for; one that no float can hold is infinite."""
    if not isinstance(value, int | float):
        return float(value) if isinstance(value, str) and value.lower() in _NO_NUMBERS else None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


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
            if found and abs(event.step) <= _MOST_STEPS:
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


def _read_console(lines: Iterable[str], file: Path, formats: Sequence[LogFormat]) -> Raw:
    """The console log: steps as an adapter's ``step_line`` finds them, and the plugin's own lines, to be quoted."""
    raw = Raw()
    pending: list[Notice] = []  # of the step whose line is still to come
    last: int | None = None
    for line, following in _with_continuation(lines):
        if said := _said(line, following):
            pending.append(said)
            continue
        for form in formats:
            if (found := form.find_step(line)) and len(found["step"]) <= _DIGITS:
                metrics = {m["name"]: float(m["value"]) for m in form.metric_pattern.finditer(found["metrics"])}
                last = int(found["step"])
                raw.add(last, metrics, file)
                raw.notices += [Notice(last, n.level, n.text) for n in pending]
                pending = []
            elif (found := form.find_planned(line)) and len(found["steps"]) <= _DIGITS:
                raw.planned = int(found["steps"])
    raw.notices += [Notice(last + 1 if last is not None else None, n.level, n.text) for n in pending]
    return raw


def _said(line: str, following: Sequence[str]) -> Notice | None:
    """The plugin's own line, or the error with which it stopped the run."""
    if _OURS in line and (found := _NOTICE.search(line)):
        return Notice(None, found[1], "\n".join([found[2], *following]))
    if found := _STOPPED.match(line):
        return Notice(None, "ERROR", f"{found[1]}: " + "\n".join([found[2], *following]))
    return None


def _with_continuation(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Each line without Ray's prefix and colours, and the indented ones that follow it."""
    held: tuple[str, list[str]] | None = None
    for line in lines:
        plain = line.rstrip("\n")
        if prefix := _RAY_PREFIX.match(plain):
            plain = plain[prefix.end() :]
        plain = _COLOUR.sub("", plain) if "\x1b" in plain else plain
        if held and plain.startswith("  ") and len(held[1]) < _LINES_OF_A_NOTICE:
            held[1].append(plain)
            continue
        if held:
            yield held
        held = (plain, [])
    if held:
        yield held


def _canonical(metrics: Mapping[str, float], trainer: LogFormat | None) -> dict[str, float]:
    """The plugin's metrics without the trainer's prefix, and the trainer's own under the report's names."""
    ours = {found[1]: value for name, value in metrics.items() if (found := _SPEC.search(name))}
    own = trainer.own_names(metrics) if trainer else {}
    if "ms_per_token" not in own and {"generation_s", "response_tokens", "samples"} <= own.keys():
        tokens = own["response_tokens"] * own["samples"]
        own |= {"ms_per_token": 1e3 * own["generation_s"] / tokens} if tokens > 0 else {}
    return own | ours


def _not_numbers(steps: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    wrong: dict[str, list[int]] = {}
    for step, values in sorted(steps.items()):
        for name, value in values.items():
            if not math.isfinite(value):
                wrong.setdefault(name, []).append(step)
    for name, where in wrong.items():
        yield f"{name} is not a finite number at step{'s' * (len(where) > 1)} {', '.join(map(str, where[:8]))}"


def _cut_off(steps: Mapping[int, Mapping[str, float]], planned: int | None) -> Iterator[str]:
    """What is missing: steps in between, at the end, or metrics of the last one."""
    numbers = sorted(steps)
    gaps = chain.from_iterable(range(before + 1, after) for before, after in pairwise(numbers))
    if missing := list(islice(gaps, 8)):
        yield f"steps are missing between the first and the last: {', '.join(map(str, missing))}"
    if planned and numbers[-1] < planned:
        yield f"{planned} steps were planned, and the log ends at step {numbers[-1]}: it is still running, or was cut off"
    last, before = (len(steps[number]) for number in (numbers[-1], numbers[max(0, len(numbers) - 2)]))
    if last < before / 2:
        yield f"step {numbers[-1]} has {last} metrics where the one before has {before}: it was cut off"


def _nothing(place: Place, remarks: Sequence[str], notices: Sequence[Notice], formats: Sequence[LogFormat]) -> str:
    """Why there is no step, in a sentence."""
    where = ", ".join(str(file) for file in place.files[:3])
    if stopped := [notice for notice in notices if notice.level == "ERROR"]:
        return f"{where}: the run was stopped before its first step: {stopped[0].text}"
    if remarks:
        return f"{where}: no step of a trainer is in it: {'; '.join(remarks)}"
    if not formats:
        return f"{where}: no adapter that is installed here says how its trainer writes down steps (log.json in its package)"
    trainers = " or ".join(form.trainer for form in formats)
    return f"{where}: no step of {trainers} is in it, neither as JSON lines, nor in event files, nor in lines of a console log"
