"""What was read of one file, before the trainer's names and the report's are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from spec_plugin.commands.report.run import Notice


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
        """What a later file of the same kind has; a copy adds nothing, nor do steps that both begin with."""
        if not later.steps.items() <= self.steps.items():
            for step, metrics in dropwhile(lambda item: self.steps.get(item[0]) == item[1], later.steps.items()):
                self.add(step, metrics, file)
        self.notices += later.notices
        self.remarks += later.remarks
        self.planned = later.planned or self.planned
