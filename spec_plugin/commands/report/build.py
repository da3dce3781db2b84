"""Puts a report together: reads the runs, finds what stands out, compares them; as JSON, or as lines for a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spec_plugin.commands.report.compare import Comparison, base_of, caveats, compare
from spec_plugin.commands.report.earned import Earned, earned_of
from spec_plugin.commands.report.findings import RunFinding, findings_of
from spec_plugin.commands.report.formats import log_formats
from spec_plugin.commands.report.places import ReportError, find_places
from spec_plugin.commands.report.read import read_place
from spec_plugin.commands.report.run import LoggedRun
from spec_plugin.commands.report.states import StateSpan, spans_of

#: of the JSON: raised when a key is taken away or gets another meaning
SCHEMA = 1
MARKS = {"bad": "error", "warn": "warning", "fine": "ok"}


@dataclass(frozen=True)
class View:
    """One run, when it drafted, and what stands out in it."""

    run: LoggedRun
    spans: tuple[StateSpan, ...]
    findings: tuple[RunFinding, ...]
    earned: Earned | None  # None: the run did not log it


@dataclass(frozen=True)
class Report:
    """Every run that could be read, and how they compare."""

    views: tuple[View, ...]
    base: str | None  # name of the run that the others are compared with
    comparisons: tuple[Comparison, ...]
    caveats: tuple[str, ...]
    problems: tuple[str, ...]  # what was named and could not be shown, a sentence each


def make_report(paths: Sequence[Path], base: str | None = None) -> Report:
    """Read these runs and look at them.

    Args:
        paths: files or folders.
        base: name of the run that the others are compared with; none: the first plain one, or the first.

    Raises:
        ReportError: if nothing of it can be read, or no run is called ``base``.
    """
    runs: list[LoggedRun] = []
    problems: list[str] = []
    formats = log_formats()
    for path in paths:
        found, failed = [], []
        try:
            for place in find_places(path, formats):
                try:
                    found.append(read_place(place, formats))
                except ReportError as error:
                    failed.append(str(error))
        except ReportError as error:
            failed.append(str(error))
        runs += found
        problems += [] if found else failed[:1]  # of a folder with runs, what is no run is no news
    if not runs:
        raise ReportError("\n".join(problems))
    runs = _with_names(runs)
    chosen = base_of(runs, base)
    views = tuple(View(run, tuple(spans_of(run)), tuple(findings_of(run)), earned_of(run)) for run in runs)
    name = chosen.name if chosen else None
    return Report(views, name, tuple(compare(runs, chosen)), tuple(caveats(runs, chosen)), tuple(problems))


def _with_names(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Names that differ: of runs of one name with folders above, as many as it takes; of the same run twice with a number."""
    named = list(runs)
    for above in range(2, 6):
        seen = Counter(run.name for run in named)
        parts = ["/".join(Path(run.sources[0]).resolve().parent.parts[-above:]) for run in runs]
        named = [replace(r, name=part) if seen[r.name] > 1 else r for r, part in zip(named, parts, strict=True)]
    seen = Counter(run.name for run in named)
    return [replace(r, name=f"{runs[i].name} ({i + 1})") if seen[r.name] > 1 else r for i, r in enumerate(named)]


def to_json(report: Report) -> str:
    """For programs, with finite numbers only. docs/reference.md says what the keys are: new ones may come, none goes."""
    table = {
        "schema": SCHEMA,
        "base": report.base,
        "problems": list(report.problems),
        "caveats": list(report.caveats),
        "comparisons": [asdict(c) | {"sentence": c.sentence} for c in report.comparisons],
        "runs": [
            view.run.as_json()
            | {"earned": view.earned and view.earned.as_json()}
            | {"speculation": [asdict(span) for span in view.spans], "findings": [asdict(f) for f in view.findings]}
            for view in report.views
        ],
    }
    return json.dumps(table, indent=1, allow_nan=False)


def to_text(report: Report) -> Iterator[str]:
    """For a terminal: what stands out, and how the runs compare."""
    for view in report.views:
        earned = f", {view.earned.sentence}" if view.earned else ""
        yield f"{view.run.name}: {view.run.extent} of {view.run.trainer or 'an unknown trainer'}{earned}"
        for finding in view.findings:
            yield f"  {'' if finding.level == 'fine' else MARKS[finding.level]:<9}{finding.text}"
    for comparison in report.comparisons:
        yield comparison.sentence
    for caveat in report.caveats:
        yield f"mind: {caveat}"
    for problem in report.problems:
        yield f"not shown: {problem}"
