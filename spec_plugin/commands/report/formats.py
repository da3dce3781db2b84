"""How a trainer writes down its steps: each adapter says it in ``log.json``, which is read without importing the adapter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from spec_plugin.commands.doctor import ADAPTER_GROUP

FILE_NAME = "log.json"
#: looks into a line of a log
Find = Callable[[str], "re.Match[str] | None"]
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
    metrics: str


class LogFormat(BaseModel):
    """What one trainer writes: lines of its console log, JSON lines if it has them, and what it calls its numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    trainer: str
    step_line: str  # regular expression with the groups ``step`` and ``metrics``
    metric: str  # the same for one metric in the latter: ``name`` and ``value``
    planned_line: str | None = None  # the same of the line that says how many ``steps`` are planned
    json_lines: JsonLines | None = None
    prefixes: tuple[str, ...] = ("",)  # that a logger may put before all names
    names: Mapping[Name, tuple[str, ...]]  # the trainer's own names, which are added up

    @cached_property
    def find_step(self) -> Find:
        """Looks for ``step_line`` in a line of the log."""
        return _finder(self.step_line)

    @cached_property
    def find_planned(self) -> Find:
        """Looks for ``planned_line``; finds nothing where the trainer has none."""
        return _finder(self.planned_line) if self.planned_line else lambda line: None

    @cached_property
    def metric_pattern(self) -> re.Pattern[str]:
        """``metric``, compiled; case is ignored, for ``NaN``."""
        return re.compile(self.metric, re.IGNORECASE)

    def own_names(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The trainer's numbers under the report's names; those that it did not log are missing."""
        found: dict[str, float] = {}
        for prefix in self.prefixes:
            for name, theirs in self.names.items():
                values = [metrics[prefix + n] for n in theirs if prefix + n in metrics]
                if values:
                    found.setdefault(name, sum(values))
        return found


def _finder(expression: str) -> Find:
    """One that begins a line is looked for there only: a log has a hundred thousand lines."""
    pattern = re.compile(expression)
    return pattern.match if expression.startswith("^") else pattern.search


def log_formats() -> list[LogFormat]:
    """Of all adapters that are installed here and have such a file.

    Raises:
        pydantic.ValidationError: if one is not as it should be.
    """
    found = {}
    for entry in metadata.entry_points(group=ADAPTER_GROUP):
        spec = find_spec(entry.module.partition(".")[0])  # of a package alone, so that nothing is imported
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(folder) / FILE_NAME
            if file.is_file():
                found[file] = LogFormat.model_validate_json(file.read_text())
    return list(found.values())
