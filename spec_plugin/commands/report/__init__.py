"""``spec-plugin report``: what a run did, as one page of HTML, from what its trainer has written anyway."""

from spec_plugin.commands.report.build import Report, make_report, to_json, to_text
from spec_plugin.commands.report.page import to_html
from spec_plugin.commands.report.read import ReportError

__all__ = ["Report", "ReportError", "make_report", "to_html", "to_json", "to_text"]
