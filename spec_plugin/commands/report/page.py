"""The report as one page of HTML that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from spec_plugin import __version__
from spec_plugin.commands.report.build import Report, View
from spec_plugin.commands.report.findings import Finding
from spec_plugin.commands.report.panels import Panel, panels_of, short_names, thinning, together
from spec_plugin.commands.report.places import ReportError
from spec_plugin.commands.report.run import Run, Spread
from spec_plugin.commands.report.state import Span

_MARKS = {"bad": "wrong", "warn": "look", "fine": "fine"}
_MANY_ROWS = 300
_REWARDED = 5  # steps whose rewards are compared
#: a heading, a metric and its format
_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("tokens", "response_tokens", ".1f"),
    ("step, s", "step_s", ".2f"),
    ("generation, s", "generation_s", ".2f"),
    ("ms a token", "ms_per_token", ".3f"),
    ("on", "spec/on", ".0f"),
    ("acceptance", "spec/acceptance_length", ".2f"),
    ("promised", "spec/expected_acceptance", ".2f"),
    ("predicted", "spec/speedup_predicted", ".2f"),
    ("realised", "spec/speedup_realised", ".2f"),
    ("draft loss", "spec/draft_loss", ".2f"),
    ("draft version", "spec/draft_version", ".0f"),
    ("training, ms", "spec/train_ms", ".0f"),
    ("refresh, ms", "spec/refresh_ms", ".0f"),
    ("harvest, ms", "spec/harvest_ms", ".1f"),
    ("log-prob diff.", "spec/logprob_diff_mean", ".1e"),
    ("tolerance", "spec/logprob_tolerance", ".1e"),
    ("lag", "spec/policy_lag", ".2f"),
)
_OVERVIEW = (
    ("steps", "", ""),
    ("drafted", "", ""),
    ("reward", "reward", ".3f"),
    ("ms a token", "ms_per_token", ".2f"),
    ("rollouts, s", "generation_s", ".2f"),
    ("step, s", "step_s", ".2f"),
    ("acceptance", "spec/acceptance_length", ".2f"),
    ("realised", "spec/speedup_realised", ".2f"),
)


@dataclass(frozen=True)
class Section:
    """What the page shows of one run."""

    run: Run
    findings: Sequence[Finding]
    spans: Sequence[Span]
    tiles: list[tuple[str, str]]
    panels: list[Panel]
    shaded: bool
    thinned: str
    columns: list[tuple[str, str]]
    rows: list[tuple[int, list[str]]]


def to_html(report: Report) -> str:
    """The page.

    Raises:
        ReportError: if jinja2 or matplotlib is not installed.
    """
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise ReportError(
            f"the page is made with jinja2, which is not installed here ({error}): pip install 'spec-plugin[report]', "
            "or take the numbers alone with --json"
        ) from error
    template = files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    runs = [view.run for view in report.views]
    several, names = len(runs) > 1, [run.name for run in runs]
    rewarded = sorted(set.intersection(*(set(run.series("reward").steps) for run in runs)))[-_REWARDED:]
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=", ".join(names),
            version=__version__,
            problems=report.problems,
            marks=_MARKS,
            views=[_section(view, not several) for view in report.views],
            together=together(runs) if several else [],
            thinned=thinning(runs),
            overview_columns=[name for name, *_ in _OVERVIEW],
            overview=[_overview(run, rewarded) for run in runs],
            rewarded=rewarded,
            short=dict(zip(names, short_names(names), strict=True)),
            comparisons=report.comparisons,
            caveats=report.caveats,
            base=report.base,
        )
    )


def _section(view: View, alone: bool) -> Section:
    run = view.run
    columns = [(heading, metric, form) for heading, metric, form in _COLUMNS if run.series(metric)]
    numbers = run.numbers if len(run.numbers) <= _MANY_ROWS else run.numbers[-_MANY_ROWS:]
    rows = [(step, [_cell(run.steps[step].get(metric), form) for _, metric, form in columns]) for step in numbers]
    return Section(
        run=run,
        findings=view.findings,
        spans=view.spans,
        tiles=_tiles(run),
        panels=panels_of(run, view.spans, alone),
        shaded=any(span.state != "on" for span in view.spans),
        thinned=thinning([run]),
        columns=[(heading, metric) for heading, metric, _ in columns],
        rows=rows,
    )


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _tiles(run: Run) -> list[tuple[str, str]]:
    """The few numbers that a person looks for first."""
    planned = f" of {run.planned}" if run.planned and run.planned > len(run.numbers) else ""
    tiles = [(f"{len(run.numbers)}{planned}", "steps")]
    drafted = run.drafted
    if run.has_plugin:
        tiles.append((f"{len(drafted)}", "steps with drafts"))
    for metric, unit, name, steps in (
        ("spec/acceptance_length", "", "tokens per forward pass, where drafted", drafted),
        ("spec/speedup_realised", "x", "decoding, by its own step times", run.numbers),
        ("ms_per_token", " ms", "generation per token", run.numbers[1:]),
        ("step_s", " s", "a whole step", run.numbers[1:]),
    ):
        if metric == "ms_per_token" and run.overlaps:
            continue
        if spread := Spread.of(run.series(metric).only(steps).values):
            tiles.append((f"{spread.median:.2f}{unit}", f"{name} (quartiles {spread.low:.2f}–{spread.high:.2f})"))
    return tiles


def _overview(run: Run, rewarded: Sequence[int]) -> list[str]:
    """A line of the table in which runs stand side by side; rewards are those of the same steps of all."""
    drafted, later = run.drafted, run.numbers[1:]
    cells = [run.name, str(len(run.numbers)), str(len(drafted)) if run.has_plugin else "plain"]
    for _, metric, form in _OVERVIEW[2:]:
        if metric == "ms_per_token" and run.overlaps:
            cells.append("–")  # what training hides is not in it
            continue
        steps = drafted if metric == "spec/acceptance_length" else rewarded if metric == "reward" else later
        spread = Spread.of(run.series(metric).only(steps).values)
        cells.append(spread.text(form) if spread else "–")
    return cells
