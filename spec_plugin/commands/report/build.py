"""Puts a report together: reads the runs, finds what stands out, compares them; as JSON, or as lines for a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spec_plugin.commands.report.findings import RunFinding, findings_of
from spec_plugin.commands.report.formats import log_formats
from spec_plugin.commands.report.read import ReportError, read_runs
from spec_plugin.commands.report.run import LoggedRun, Spread
from spec_plugin.commands.report.states import StateSpan, spans_of

#: of the JSON: raised when a key is taken away or gets another meaning
SCHEMA = 2
MARKS = {"bad": "error", "warn": "warning", "fine": "ok"}
#: what is compared; of each, smaller is faster
_COMPARED = {"ms_per_token": "generation, per token", "generation_s": "generation that the trainer waits for"}
_COMPARED |= {"step_s": "whole step"}


@dataclass(frozen=True)
class View:
    """One run, when it drafted, and what stands out in it."""

    run: LoggedRun
    spans: tuple[StateSpan, ...]
    findings: tuple[RunFinding, ...]


@dataclass(frozen=True)
class Comparison:
    """How one run's times relate to those of the base, step by step."""

    run: str
    base: str
    what: str
    ratio: Spread  # base over run, step by step: above 1 is faster
    first: int  # the first step that counts
    last: int

    @property
    def sentence(self) -> str:
        """The comparison in one sentence."""
        steps = f"{self.ratio.count} steps from {self.first} to {self.last}"
        return f"{self.run} against {self.base}, {self.what}: {self.ratio.text(unit='x')} speed-up, {steps}"


@dataclass(frozen=True)
class Report:
    """Every run that could be read, and how they compare."""

    views: tuple[View, ...]
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
        except ReportError as error:
            problems.append(str(error))
    if not found:
        raise ReportError("\n".join(problems))
    seen = Counter(run.name for _, run in found)
    runs = [replace(run, name=f"{run.name} ({path})") if seen[run.name] > 1 else run for path, run in found]
    views = tuple(View(run, tuple(spans_of(run)), tuple(findings_of(run))) for run in runs)
    chosen = _base_of(runs, base)
    pairs = [(run, chosen) for run in runs if chosen and run is not chosen]
    comparisons = tuple(comparison for pair in pairs for comparison in compare(*pair))
    caveats = tuple(caveat for pair in pairs for caveat in _caveats(*pair))
    return Report(views, chosen.name if chosen else None, comparisons, caveats, tuple(problems))


def _base_of(runs: Sequence[LoggedRun], name: str | None) -> LoggedRun | None:
    """What the others are compared with: the run of this name, or the first plain one, or the first; of one run nothing."""
    if name is not None and name not in (names := [run.name for run in runs]):
        raise ReportError(f"--base {name}: no run of this name; there are: {', '.join(names)}")
    wanted = [run for run in runs if (run.name == name if name is not None else not run.has_plugin)]
    return (wanted or list(runs))[0] if len(runs) > 1 else None


def compare(run: LoggedRun, base: LoggedRun) -> Iterator[Comparison]:
    """A run against the base of the same trainer, at the steps that both have.

    Step 1 starts things up and is left out. Of a run with the plugin only what comes from its first drafted step on counts:
    before it there is nothing to compare. Of generation an asynchronous run has only what training does not hide, a second or
    none: ratios of it say nothing.
    """
    start = max(2, *run.drafted[:1], 2)
    for name in ["step_s"] if run.overlaps or base.overlaps else _COMPARED:
        reference = base.series(name)
        ratios = {s: reference[s] / v for s, v in run.series(name).items() if s >= start and v > 0 and s in reference}
        if run.trainer == base.trainer and (spread := Spread.of(ratios.values())):
            yield Comparison(run.name, base.name, _COMPARED[name], spread, min(ratios), max(ratios))


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
    """For programs, with finite numbers only. docs/reference.md says what the keys are."""
    runs = [
        asdict(view.run)
        | {
            "plugin": view.run.has_plugin,
            "earned": view.run.earned and asdict(view.run.earned) | {"net_s": view.run.earned.net_s},
            "steps": [{"step": step, **view.run.steps[step]} for step in view.run.numbers],
            "speculation": [asdict(span) for span in view.spans],
            "findings": [asdict(finding) for finding in view.findings],
        }
        for view in report.views
    ]
    comparisons = [asdict(comparison) | {"sentence": comparison.sentence} for comparison in report.comparisons]
    others = {name: getattr(report, name) for name in ("base", "problems", "caveats")}
    return json.dumps({"schema": SCHEMA, **others, "comparisons": comparisons, "runs": runs}, indent=1, allow_nan=False)


def to_text(report: Report) -> Iterator[str]:
    """For a terminal: what stands out, and how the runs compare."""
    for view in report.views:
        run, steps = view.run, f"{len(view.run.numbers)} steps"
        steps += f" (one in {run.every} is logged)" if run.every > 1 else ""
        earned = f", {run.earned.sentence}" if run.earned else ""
        yield f"{run.name}: {steps} of {run.trainer or 'an unknown trainer'}{earned}"
        for finding in view.findings:
            yield f"  {'' if finding.level == 'fine' else MARKS[finding.level]:<9}{finding.text}"
    yield from (comparison.sentence for comparison in report.comparisons)
    yield from (f"mind: {caveat}" for caveat in report.caveats)
    yield from (f"not shown: {problem}" for problem in report.problems)
