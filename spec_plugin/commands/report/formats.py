"""How a trainer writes down its steps: each adapter says it in ``log.json``, which is read without importing the adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from spec_plugin.commands.adapters import installed_adapters

FILE_NAME = "log.json"
#: no run comes to this step; a number beyond it is a time, or no step at all
MOST_STEPS = 1_000_000
#: as which "not a number" and the infinities are written by loggers that keep to JSON, in small letters
_NO_NUMBERS = ("nan", "infinity", "-infinity", "inf", "-inf")
#: the report's own names for what every trainer measures, means of a step; docs/reference.md says what they are
_TIMES = Literal["step_s", "generation_s", "ms_per_token"]
Name = _TIMES | Literal["reward", "response_tokens", "samples", "staleness", "lr", "entropy", "grad_norm"]


class StateFile(BaseModel):
    """A JSON file in each checkpoint that holds all steps so far, an object each, with the numbers beside ``step``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    folders: str  # pattern of the checkpoints' folders' names, such as ``checkpoint-*``
    steps: str  # key of the list
    planned: str  # key of the number of steps that the run is to have


class LogFormat(BaseModel):
    """What one trainer writes besides TensorBoard's event files, and what it calls its numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    trainer: str
    option: str  # with which it writes something that is read here
    json_lines: str | None = None  # key of the numbers in a line of JSON; empty: they stand beside ``step``
    state_file: StateFile | None = None
    prefixes: tuple[str, ...] = ("",)  # that a logger may put before all names
    names: Mapping[Name, tuple[str, ...]]  # the trainer's own names, of which the first that it logged counts

    def own_names(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The trainer's numbers under the report's names; those that it did not log are missing."""
        theirs = {name: [p + n for p in self.prefixes for n in names] for name, names in self.names.items()}
        found = {name: [metrics[n] for n in names if n in metrics] for name, names in theirs.items()}
        return {name: values[0] for name, values in found.items() if values}


def log_formats() -> list[LogFormat]:
    """Of all adapters that are installed here and have such a file.

    Raises:
        pydantic.ValidationError: if one is not as it should be.
    """
    found = {}
    for entry in installed_adapters().values():
        spec = find_spec(entry.module.partition(".")[0])  # of a package alone, so that nothing is imported
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (file := Path(folder) / FILE_NAME).is_file():
                found[file] = LogFormat.model_validate_json(file.read_text())
    return list(found.values())


def step_in(record: object, formats: Sequence[LogFormat], texts: bool = False) -> tuple[int, dict[str, float]] | None:
    """A step's number and its metrics, from an object of JSON; None if no trainer writes a step like it.

    Args:
        record: what was parsed.
        formats: of all trainers.
        texts: may there be anything but numbers beside the step. In a line of JSON it makes a rollout of it.
    """
    if not isinstance(record, dict) or (step := step_number(record.get("step"))) is None:
        return None
    for form in formats:
        beside = {name: value for name, value in record.items() if name != "step" and value is not None}
        inner = record.get(form.json_lines) if form.json_lines else beside
        if form.json_lines is not None and isinstance(inner, dict):
            metrics = {name: number for name, value in inner.items() if (number := _number(value)) is not None}
            if form.json_lines or (form.own_names(metrics) and (texts or len(metrics) == len(inner))):
                return step, metrics
    return None


def step_number(value: object) -> int | None:
    """The number of a step; None if it is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_STEPS
    return int(value) if known and isinstance(value, int | float) else None


def _number(value: object) -> float | None:
    """A metric; one that no float can hold is infinite."""
    if not isinstance(value, int | float):
        return float(value) if isinstance(value, str) and value.lower() in _NO_NUMBERS else None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
