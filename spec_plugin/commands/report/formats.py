"""How a trainer writes down its steps: each adapter says it in ``log.json``, which is read without importing the adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from spec_plugin.commands.adapters import installed_adapters
from spec_plugin.commands.report.numbers import numbers_of

FILE_NAME = "log.json"
#: finds nothing in any line
_NOTHING = re.compile(r"(?!)")
#: the report's own names for what every trainer measures; seconds are of one step
Name = Literal[
    "step_s",  # the whole step
    "generation_s",  # as long as the trainer waits for rollouts
    "logprobs_s",  # recomputed log-probs, rewards and advantages
    "update_s",  # the policy's update
    "sync_s",  # the weight sync
    "ms_per_token",  # generation_s in milliseconds over all tokens of the responses
    "reward",
    "response_tokens",  # mean of the step's responses
    "samples",  # responses
    "staleness",  # policy versions between sampling and training, mean
    "lr",
    "entropy",
    "grad_norm",
    "loss",
]


class JsonLines(BaseModel):
    """Keys of a line of JSON that holds a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: str
    metrics: str | None = None  # None: the numbers stand beside the step


class StateFile(BaseModel):
    """A JSON file in each checkpoint that holds all steps so far, an object each, with the numbers beside the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    folders: str  # pattern of the checkpoints' folders' names, such as ``checkpoint-*``
    steps: str  # key of the list
    step: str  # key in each object of it
    planned: str | None = None  # key of the number of steps that the run is to have


class LogFormat(BaseModel):
    """What one trainer writes: lines of its console log, JSON lines if it has them, and what it calls its numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    trainer: str
    step_line: re.Pattern[str]  # with the groups ``metrics`` and, if the trainer prints it, ``step``
    metric: str  # the same for one metric in the latter: ``name`` and ``value``
    planned_line: re.Pattern[str] = _NOTHING  # the same of the line that says how many ``steps`` are planned
    progress_bar: re.Pattern[str] = (
        _NOTHING  # the same of its bar, ``step`` and ``steps``; for a ``step_line`` without ``step``
    )
    printed_line: re.Pattern[str] = (
        _NOTHING  # the same of each line that it prints in the bar's place, steps' lines among them
    )
    epoch: str | None = None  # name of the metric that grows by the same amount in each step; for the same
    json_lines: JsonLines | None = None
    state_file: StateFile | None = None
    prefixes: tuple[str, ...] = ("",)  # that a logger may put before all names
    names: Mapping[Name, tuple[str, ...]]  # the trainer's own names, which are added up

    def epoch_of(self, metrics: Mapping[str, float]) -> float | None:
        """What the trainer logged as ``epoch``; None where it did not."""
        names = [prefix + self.epoch for prefix in self.prefixes] if self.epoch else []
        return next((metrics[name] for name in names if name in metrics), None)

    @cached_property
    def metric_pattern(self) -> re.Pattern[str]:
        """``metric``, compiled; case is ignored, for ``NaN``."""
        return re.compile(self.metric, re.IGNORECASE)

    def metrics_in(self, record: Mapping[str, object]) -> dict[str, float] | None:
        """The numbers of a step in an object of a JSON line; None if the trainer writes none like it.

        Where they stand beside the step, an object with anything else in it is no step: rollouts have such numbers, and texts.
        """
        if (keys := self.json_lines) is None or keys.step not in record:
            return None
        if keys.metrics is not None:
            inner = record.get(keys.metrics)
            return numbers_of(inner) if isinstance(inner, dict) else None
        metrics = numbers_of(record, keys.step)
        others = [value for name, value in record.items() if name not in metrics and name != keys.step]
        return metrics if self.own_names(metrics) and not any(value is not None for value in others) else None

    def is_state_file(self, file: Path) -> bool:
        """Is this a checkpoint's file of all steps so far, by its name."""
        return self.state_file is not None and file.name == self.state_file.name

    def is_checkpoint(self, folder: Path) -> bool:
        """Is this a checkpoint with such a file, by its name: what is in it is of the run of the folder above."""
        return self.state_file is not None and fnmatch(folder.name, self.state_file.folders)

    def own_names(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The trainer's numbers under the report's names; those that it did not log are missing."""
        found: dict[str, float] = {}
        for prefix in self.prefixes:
            for name, theirs in self.names.items():
                values = [metrics[prefix + n] for n in theirs if prefix + n in metrics]
                if values:
                    found.setdefault(name, sum(values))
        return found


def log_formats() -> list[LogFormat]:
    """Of all adapters that are installed here and have such a file.

    Raises:
        pydantic.ValidationError: if one is not as it should be.
    """
    found = {}
    for entry in installed_adapters().values():
        spec = find_spec(entry.module.partition(".")[0])  # of a package alone, so that nothing is imported
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(folder) / FILE_NAME
            if file.is_file():
                found[file] = LogFormat.model_validate_json(file.read_text())
    return list(found.values())
