"""Runs for ``spec-plugin report``: the folder of those that trainers have written, and made ones."""

from __future__ import annotations

from builders.paths import TESTS
from spec_plugin.commands.report.run import LoggedRun

DATA = TESTS / "data" / "report"


def made(count: int = 60, **columns: object) -> LoggedRun:
    """A run with these metrics, ``spec_on`` for ``spec/on``: a number for all steps, or a function of the step."""
    names = {name: name.replace("spec_", "spec/", 1) for name in columns}
    base = {"spec/on": 1.0, "spec/failed": 0.0, "spec/provenance": 1.0, "spec/versions_known": 1.0, "step_s": 10.0}
    steps = {
        step: base | {names[n]: float(c(step) if callable(c) else c) for n, c in columns.items()}
        for step in range(1, count + 1)
    }
    return LoggedRun("made", "verl", steps)
