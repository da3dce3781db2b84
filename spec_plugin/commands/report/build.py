"""Puts a report together: reads the runs, finds what stands out, compares them; as JSON, or as lines for a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spec_plugin.api.errors import SpecPluginError
from spec_plugin.commands.report.findings import findings_of
from spec_plugin.commands.report.formats import log_formats
from spec_plugin.commands.report.read import ReportError, read_runs
from spec_plugin.commands.report.run import SIDE_BY_SIDE, LoggedRun, Spread
from spec_plugin.commands.report.states import spans_of

#: of the JSON: raised when a key is taken away or gets another meaning
SCHEMA = 2
MARKS = {"bad": "error", "warn": "warning", "fine": "ok"}
#: of what is set side by side, what is compared step by step; of each, smaller is faster
_COMPARED = ("ms_per_token", "generation_s", "step_s")


@dataclass(frozen=True)
class Comparison:
    """How one run's times relate to those of the base, step by step."""

    run: str
    base: str
    what: str
    ratio: Spread  # base over run, step by step: above 1 is faster
    first: int  # the first step that counts
    last: int


@dataclass(frozen=True)
class Report:
    """Every run that could be read, and how they compare."""

    runs: tuple[LoggedRun, ...]
    base: str | None  # name of the run that the others are compared with
    comparisons: tuple[Comparison, ...]
    caveats: tuple[str, ...]  # why a comparison may not be one
    problems: tuple[str, ...]  # what was named and could not be shown, a sentence each


def make_report(paths: Sequence[Path], base: str | None = None) -> Report:
    """Read these runs and look at them.

    Args:
        paths: files or folders.
        base: name of the run that the others are compared with; none: the first plain one, or the first.

    Raises:
        ReportError: if nothing of it can be read, or no run is called ``base``.
    """
    found, problems, formats = list[tuple[Path, LoggedRun]](), list[str](), log_formats()
    for path in dict.fromkeys(paths):
        try:
            found += [(path, run) for run in read_runs(path, formats)]
        except SpecPluginError as error:
            problems.append(str(error))
    if not found:
        raise ReportError("\n".join(problems))
    seen = Counter(run.name for _, run in found)
    runs = [replace(run, name=f"{run.name} ({path})") if seen[run.name] > 1 else run for path, run in found]
    names = [run.name for run in runs]
    if base is not None and base not in names:
        raise ReportError(f"--base {base}: no run of this name; there are: {', '.join(names)}")
    plain = [run for run in runs if not run.has_plugin]
    reference = runs[names.index(base)] if base is not None else [*plain, *runs][0]
    others = [run for run in runs if run is not reference]
    return Report(
        tuple(runs),
        reference.name if others else None,
        tuple(comparison for run in others for comparison in compare(run, reference)),
        tuple(caveat for run in others for caveat in _caveats(run, reference)),
        tuple(problems),
    )


def compare(run: LoggedRun, base: LoggedRun) -> Iterator[Comparison]:
    """A run against the base of the same trainer, at the steps that both have.

    Step 1 starts things up and is left out. Of a run with the plugin only what comes from its first drafted step on counts:
    before it there is nothing to compare. Of generation an asynchronous run has only what training does not hide, a second or
    none: ratios of it say nothing.
    """
    start = max([2, *run.drafted[:1]])
    for name in ["step_s"] if run.overlaps or base.overlaps else _COMPARED:
        theirs = base.series(name)
        ratios = {s: theirs[s] / v for s, v in run.series(name).items() if s >= start and v > 0 and s in theirs}
        if run.trainer == base.trainer and (spread := Spread.of(ratios.values())):
            yield Comparison(run.name, base.name, SIDE_BY_SIDE[name][0], spread, min(ratios), max(ratios))


def _caveats(run: LoggedRun, base: LoggedRun) -> Iterator[str]:
    if run.trainer != base.trainer:
        trainers = [each.trainer or "an unknown trainer" for each in (run, base)]
        yield f"{run.name} is a run of {trainers[0]}, {base.name} of {trainers[1]}: they are not compared"
        return
    mine, their = (Spread.of(r.series("response_tokens").values()) for r in (run, base))
    if mine and their and abs(mine.median - their.median) > 0.1 * their.median:
        lengths = f"{mine.median:.0f} and {their.median:.0f} tokens"
        yield f"responses of {run.name} and {base.name} have {lengths} in the median"
    if run.overlaps or base.overlaps:
        text = "is asynchronous and waits only for what training does not hide: generation times are not compared"
        yield f"{run.name if run.overlaps else base.name} {text}"


def to_json(report: Report) -> str:
    """For programs, with finite numbers only. docs/reference/metrics.md says what the keys are."""
    runs = []
    for run in report.runs:
        found = asdict(run) | {"plugin": run.has_plugin, "earned": None}
        if run.earned:
            found["earned"] = asdict(run.earned) | {"net_s": run.earned.net_s}
        found["steps"] = [{"step": step, **run.steps[step]} for step in run.numbers]
        found["speculation"] = [asdict(span) for span in spans_of(run)]
        found["findings"] = [asdict(finding) for finding in findings_of(run)]
        runs.append(found)
    return json.dumps({"schema": SCHEMA, **asdict(report), "runs": runs}, indent=1, allow_nan=False)


def to_text(report: Report) -> Iterator[str]:
    """For a terminal: what stands out, and how the runs compare."""
    for run in report.runs:
        every = f" (one in {run.every} is logged)" if run.every > 1 else ""
        earned = f", {run.earned.sentence}" if run.earned else ""
        yield f"{run.name}: {len(run.numbers)} steps{every} of {run.trainer or 'an unknown trainer'}{earned}"
        for finding in findings_of(run):
            yield f"  {'' if finding.level == 'fine' else MARKS[finding.level]:<9}{finding.text}"
    for c in report.comparisons:
        steps = f"{c.ratio.count} steps from {c.first} to {c.last}"
        yield f"{c.run} against {c.base}, {c.what}: {c.ratio.text(unit='x')} speed-up, {steps}"
    yield from (f"mind: {caveat}" for caveat in report.caveats)
    yield from (f"not shown: {problem}" for problem in report.problems)
