"""Finds the files of runs and reads them: JSON lines, checkpoints' files of all steps so far, TensorBoard's event files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from spec_plugin.api.errors import SpecConfigError, SpecPluginError
from spec_plugin.commands.report.formats import MOST_STEPS, LogFormat, step_in
from spec_plugin.commands.report.run import LoggedRun
from spec_plugin.plan.text_files import lines_of, text_of

Step = tuple[int, dict[str, float]]
#: what yields the steps of a file, and adds to the list what could not be read of it
Reader = Callable[[Path, Sequence[LogFormat], list[str]], Iterator[Step]]
#: where files of steps lie in a folder that was named: in it, or at most three folders below
_PLACES = ("*", "*/*", "*/*/*", "*/*/*/*")
_HEADER = 20  # lines within which the first step stands, behind what a logger writes at its start
_SPEC = re.compile(r"(?:^|/)(spec/.+)$")


class ReportError(SpecPluginError, ValueError):
    """Nothing can be reported of what was named; the message is one line for a person."""


def read_runs(path: Path, formats: Sequence[LogFormat]) -> list[LoggedRun]:
    """The runs of ``runs_as_logged``, under the report's names, with what is missing of each.

    Raises:
        ReportError: if there is no such path, or no step to read in it.
    """
    return [_translated(run, formats) for run in runs_as_logged(path, formats)]


def runs_as_logged(path: Path, formats: Sequence[LogFormat]) -> list[LoggedRun]:
    """The runs in a file or folder, under the trainer's own names.

    Each file of JSON lines is one, each folder of checkpoints or of event files. Event files in a
    folder of checkpoints, or below it, are of the same run.

    Raises:
        ReportError: if there is no such path, or no step to read in it.
    """
    if not path.exists():
        raise ReportError(f"{path}: there is no such file or folder")
    if not (path.is_file() or path.is_dir()):
        raise ReportError(f"{path} is a pipe or a device: give a file or a folder")
    top = path.absolute()
    files = [top] if top.is_file() else [file for place in _PLACES for file in sorted(top.glob(place))]
    known = {file: found for file in files if file.is_file() and (found := _kind_of(file, formats))}
    checkpointed = {home for reader, home in known.values() if reader is _state}
    runs: dict[Path, list[Path]] = {}
    for file, (reader, home) in known.items():
        above = checkpointed.intersection(file.parents) if reader is _events else ()
        runs.setdefault(max(above, default=home), []).append(file)
    read = []
    for home, of_run in runs.items():
        name = str(home.relative_to(top)) if top in home.parents else home.resolve().name
        states = sorted((file for file in of_run if known[file][0] is _state), key=_number)
        others = sorted((file for file in of_run if known[file][0] is not _state), key=lambda file: file.name)
        read.append(_read(name, {file: known[file][0] for file in (*states, *others)}, formats))
    if not any(run.steps for run in read):
        remarks = [remark for run in read for remark in run.remarks]
        raise ReportError("; ".join([f"{path}: no step of a trainer is in it yet", *remarks[:3], _accepted(formats)]))
    return sorted((run for run in read if run.steps), key=lambda run: run.name)


def _accepted(formats: Sequence[LogFormat]) -> str:
    states = [form.state_file for form in formats if form.state_file]
    kinds = ", ".join(["JSON lines of steps (*.jsonl)", *states, "TensorBoard's event files"])
    options = "; ".join(sorted((f"{form.trainer}: {form.option}" for form in formats), key=str.lower))
    return f"what is read are {kinds}, and no console logs. To have them written: {options}"


def _kind_of(file: Path, formats: Sequence[LogFormat]) -> tuple[Reader, Path] | None:
    """What reads a file of this name, and after what its run is called: a folder, or a file of JSON lines without its ending."""
    if "tfevents" in file.name:
        return _events, file.parent
    for pattern in (form.state_file for form in formats if form.state_file):
        if file.match(Path(pattern).name):
            return _state, file.parent.parent if file.match(pattern) else file.parent
    if file.suffix != ".jsonl":
        return None
    return _json_lines, file.parent if file.stem == "metrics" else file.parent / file.stem


def _read(name: str, readers: Mapping[Path, Reader], formats: Sequence[LogFormat]) -> LoggedRun:
    """One run, under the trainer's own names, from its files in order.

    Where a step comes again, what was read of it and of all after it is dropped: a later checkpoint has it, too, or the run was
    resumed there.
    """
    steps, remarks = dict[int, dict[str, float]](), list[str]()
    for file, reader in readers.items():
        last = -1
        for step, metrics in reader(file, formats, remarks):
            if step in steps and step != last:
                steps = {s: values for s, values in steps.items() if s < step}
            steps.setdefault(step, {}).update(metrics)
            last = step
    return LoggedRun(name, "", steps, tuple(remarks), tuple(map(str, readers)))


def _number(state: Path) -> int:
    """The last number in the name of a checkpoint's folder, so that ``checkpoint-9`` comes before ``checkpoint-10``."""
    return int([0, *re.findall(r"\d+", state.parent.name)][-1])


def _state(file: Path, formats: Sequence[LogFormat], remarks: list[str]) -> Iterator[Step]:
    """A checkpoint's file of all steps so far, under the key that an adapter's ``state_steps`` names."""
    content = _parsed(text_of(file))
    if not isinstance(content, dict):
        remarks.append(f"{file.parent.name}/{file.name}: it is no JSON, or was cut off while it was written")
        return
    lists = [content.get(form.state_steps) for form in formats if form.state_file]
    yield from filter(None, (step_in(r, formats) for records in lists if isinstance(records, list) for r in records))


def _json_lines(file: Path, formats: Sequence[LogFormat], remarks: list[str]) -> Iterator[Step]:
    """One object a line, whose keys an adapter's ``json_lines`` names; what is no step is counted.

    Where no step is among the first lines it is a file of prompts or rollouts, and is read no further.
    """
    broken, any_step = list[int](), False
    try:
        for number, line in enumerate(lines_of(file), 1):
            if step := step_in(_parsed(line), formats):
                any_step = True
                yield step
            elif line.strip():
                broken.append(number)
            if number >= _HEADER and not any_step:
                break
    except SpecConfigError as error:  # such as of rollouts of many GiB beside the steps
        remarks.append(str(error))
    if broken:
        text = f"{len(broken)} of its lines are cut off or hold no step, the first is line {broken[0]}"
        remarks.append(f"{file.name}: {text}")


def _parsed(text: str) -> object:
    """What is in a text of JSON, all numbers as floats, of whatever size; None if it is no JSON."""
    try:
        return json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        return None


def _events(file: Path, formats: Sequence[LogFormat], remarks: list[str]) -> Iterator[Step]:
    """TensorBoard's event file, which has an event for each number of a step.

    Its own reader would check sums byte by byte in Python: half a minute for a thousand steps.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        text = f"event files are read with tensorboard, which is not installed here ({error})"
        raise ReportError(f"{file}: {text}: pip install tensorboard") from error
    step = -1
    try:
        for event in map(Event.FromString, _records(file)):
            values = [value for value in event.summary.value if value.HasField("simple_value")]
            if values and abs(event.step) <= MOST_STEPS:
                step = int(event.step)  # TRL's and OpenRLHF's loggers put a word before all names
                yield step, {value.tag.removeprefix("train/"): value.simple_value for value in values}
    except (DecodeError, EOFError):
        where = f"a record after step {step} is broken or cut off"
        remarks.append(f"{file.name}: {where}, and it was read up to there")


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


def _translated(read: LoggedRun, formats: Sequence[LogFormat]) -> LoggedRun:
    """A run that was read under its trainer's names, under the report's, with what is missing of it."""
    logged = {name: 0.0 for metrics in read.steps.values() for name in metrics}
    trainer = max(formats, key=lambda form: len(form.own_names(logged)), default=None)
    trainer = trainer if trainer and trainer.own_names(logged) else None
    steps = {step: _canonical(read.steps[step], trainer) for step in read.numbers}
    steps = {step: values for step, values in steps.items() if values} or steps
    not_finite: dict[str, int] = {}
    for step, values in steps.items():
        for name in [name for name, value in values.items() if not math.isfinite(value)]:
            not_finite.setdefault(name, step)
            del values[name]
    run = replace(read, trainer=trainer.trainer if trainer else "", steps=steps)
    remarks = [f"{name} is not a finite number at step {step}" for name, step in not_finite.items()]
    first = math.ceil(run.numbers[0] / run.every) * run.every  # some trainers log each tenth step and the first, say
    if missing := [*islice((n for n in range(first, run.numbers[-1], run.every) if n not in steps), 8)]:
        remarks.append(f"steps are missing between the first and the last: {', '.join(map(str, missing))}")
    return replace(run, remarks=(*read.remarks, *remarks))


def _canonical(metrics: Mapping[str, float], trainer: LogFormat | None) -> dict[str, float]:
    """The plugin's metrics without the trainer's prefix, and the trainer's own under the report's names."""
    values = trainer.own_names(metrics) if trainer else {}
    tokens = values.get("response_tokens", 0.0) * values.get("samples", 0.0)
    if "generation_s" in values and tokens > 0:
        values.setdefault("ms_per_token", 1e3 * values["generation_s"] / tokens)
    return values | {found[1]: value for name, value in metrics.items() if (found := _SPEC.search(name))}
