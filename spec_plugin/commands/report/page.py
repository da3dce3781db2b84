"""The report as one page of HTML that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from spec_plugin import __version__
from spec_plugin.commands.report.build import MARKS, Report
from spec_plugin.commands.report.figures import POINTS, draw
from spec_plugin.commands.report.panels import panels_of, together
from spec_plugin.commands.report.read import ReportError
from spec_plugin.commands.report.run import LoggedRun, Spread

_REWARDED = 5  # steps whose rewards are compared
#: of the table that begins the page: a heading, a metric and its format
_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("generation, ms a token", "ms_per_token", ".2f"),
    ("rollouts, s", "generation_s", ".2f"),
    ("step, s", "step_s", ".2f"),
    ("acceptance", "spec/acceptance_length", ".2f"),
    ("decoding speed-up", "spec/speedup_realised", ".2f"),
)


def to_html(report: Report) -> str:
    """The page.

    Raises:
        ReportError: if jinja2 or matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment
    except ImportError as error:
        text = "the page is made with jinja2 and matplotlib, which are not both installed here"
        raise ReportError(
            f"{text} ({error}): pip install 'spec-plugin[report]', or take the numbers with --json"
        ) from error
    runs = [view.run for view in report.views]
    columns = [column for column in _COLUMNS if any(run.series(column[1]) for run in runs)]
    rewarded = sorted(set.intersection(*(set(run.series("reward").steps) for run in runs)))[-_REWARDED:]
    sections = []
    for view in report.views:
        plain = [s for span in view.spans if span.state != "on" for s in range(span.first, span.last + 1)]
        sections.append((view, [draw(panel, view.run.name, plain) for panel in panels_of(view.run, view.spans)]))
    page = Environment(autoescape=True).from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return page.render(
        report=report,
        version=__version__,
        marks=MARKS,
        columns=["steps", "with drafts", *(heading for heading, *_ in columns)],
        rows=[_row(run, columns, rewarded) for run in runs],
        rewarded=rewarded,
        together=[draw(panel, "together") for panel in together(runs)] if len(runs) > 1 else [],
        thinned=max(-(-len(run.numbers) // POINTS) for run in runs),
        sections=sections,
    )


def _row(run: LoggedRun, columns: Sequence[tuple[str, str, str]], rewarded: Sequence[int]) -> list[str]:
    """A run's line of the table: medians with quartiles; rewards are those of the same steps of all."""
    planned = f" of {run.planned}" if run.planned and run.planned > len(run.numbers) * run.every else ""
    cells = [run.name, f"{len(run.numbers)}{planned}", str(len(run.drafted)) if run.has_plugin else "plain"]
    for _, metric, form in columns:
        drafted = metric == "spec/acceptance_length"
        steps = run.drafted if drafted else rewarded if metric == "reward" else run.numbers[1:]
        hidden = metric == "ms_per_token" and run.overlaps  # what training hides is not in it
        spread = None if hidden else Spread.of(run.series(metric).only(steps).values)
        cells.append(spread.text(form) if spread else "–")
    return cells
