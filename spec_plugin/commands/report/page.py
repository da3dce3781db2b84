"""The report as one page of HTML that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from spec_plugin import __version__
from spec_plugin.commands.report.build import MARKS, Report
from spec_plugin.commands.report.figures import draw
from spec_plugin.commands.report.findings import findings_of
from spec_plugin.commands.report.panels import panels_of, together
from spec_plugin.commands.report.read import ReportError
from spec_plugin.commands.report.run import SIDE_BY_SIDE, LoggedRun, Spread, only
from spec_plugin.commands.report.states import spans_of


def to_html(report: Report) -> str:
    """The page.

    Raises:
        ReportError: if jinja2 or matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment
    except ImportError as error:
        text = f"the page is made with jinja2 and matplotlib, which are not both installed here ({error})"
        raise ReportError(f"{text}: pip install 'spec-plugin[report]', or take the numbers with --json") from error
    runs = report.runs
    columns = [metric for metric in SIDE_BY_SIDE if any(run.series(metric) for run in runs)]
    common = sorted(set(runs[0].numbers).intersection(*(run.numbers for run in runs)))[1:]
    sections = []
    for run in runs:
        spans = spans_of(run)
        figures = [(panel.title, draw(panel, run.name, spans)) for panel in panels_of(run, spans)]
        sections.append((run, spans, findings_of(run), figures))
    page = Environment(autoescape=True).from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return page.render(
        report=report,
        version=__version__,
        marks=MARKS,
        columns=["steps", "with drafts", *(", ".join(SIDE_BY_SIDE[metric]) for metric in columns)],
        rows=[_row(run, columns, common) for run in runs],
        common=common,
        together=[(panel.title, draw(panel, "together")) for panel in together(runs)] if len(runs) > 1 else [],
        sections=sections,
    )


def _row(run: LoggedRun, columns: Sequence[str], common: Sequence[int]) -> list[str]:
    """A run's line of the table: medians with quartiles, of the steps that all runs have."""
    cells = [run.name, str(len(run.numbers)), str(len(run.drafted)) if run.has_plugin else "plain"]
    for metric in columns:
        steps = set(common).intersection(run.drafted) if metric == "spec/acceptance_length" else common
        hidden = metric == "ms_per_token" and run.overlaps  # what training hides is not in it
        spread = None if hidden else Spread.of(only(run.series(metric), steps).values())
        cells.append(spread.text() if spread else "–")
    return cells
