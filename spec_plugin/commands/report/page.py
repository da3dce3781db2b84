"""The report as one page of HTML that needs nothing else: no network, no scripts."""

from __future__ import annotations

from importlib.resources import files

from spec_plugin import __version__
from spec_plugin.commands.report.build import MARKS, Report
from spec_plugin.commands.report.figures import draw
from spec_plugin.commands.report.findings import findings_of
from spec_plugin.commands.report.panels import panels_of, together
from spec_plugin.commands.report.read import ReportError
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
        raise ReportError(f"{text}: pip install jinja2 matplotlib, or take the numbers with --json") from error
    sections = []
    for run in report.runs:
        spans = spans_of(run)
        figures = [(panel.title, draw(panel, run.name, spans)) for panel in panels_of(run, spans)]
        sections.append((run, spans, findings_of(run), figures))
    page = Environment(autoescape=True).from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return page.render(
        report=report,
        version=__version__,
        marks=MARKS,
        together=[(panel.title, draw(panel, "together")) for panel in together(report.runs)],
        sections=sections,
    )
