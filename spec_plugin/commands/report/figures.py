"""Matplotlib's figures as SVG that stands in a page: its colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from spec_plugin.commands.report.places import ReportError
from spec_plugin.commands.report.run import Series

#: colours that stand for the page's variables: nothing else is drawn with them
INK, FAINT = "#00f001", "#00f002"
COLOURS = tuple(f"#00f0{16 + i:02x}" for i in range(8))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", **{c: f"var(--c{i})" for i, c in enumerate(COLOURS)}}
_INKED = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
_SETTINGS = {
    "svg.fonttype": "none",  # the page's fonts
    "font.size": 9,
    "axes.titlesize": 10,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    **dict.fromkeys(_INKED, INK),
}
_DOTS_UP_TO = 80  # steps
POINTS = 400  # of a line; of more steps it shows medians


class Canvas:
    """One figure with one pair of axes, and its SVG."""

    def __init__(self, title: str, unit: str, salt: str) -> None:
        """An empty figure; ``salt`` makes its ids differ from those of the page's others of this title.

        Raises:
            ReportError: if matplotlib is not installed.
        """
        try:
            import matplotlib
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise ReportError(
                f"the figures are drawn by matplotlib, which is not installed here ({error}): pip install 'spec-plugin[report]', "
                "or take the numbers alone with --json"
            ) from error
        self._matplotlib = matplotlib
        self._settings = _SETTINGS | {"svg.hashsalt": f"{salt} {title}"}
        with matplotlib.rc_context(self._settings):
            self._figure = Figure(figsize=(4.8, 2.8))
            self.axes = self._figure.add_axes((0.13, 0.15, 0.84, 0.75))
            self.axes.set_title(title, loc="left")
            self.axes.set_ylabel(unit)
            self.axes.set_xlabel("trainer step")
            self.axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            self.axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
            self.axes.grid(True)
            self.axes.set_axisbelow(True)

    def line(self, series: Series, label: str, colour: str, style: str) -> None:
        """Draw one series; of a long one medians, and how far its values lie from them."""
        marker = "." if style == "-" and len(series.steps) <= _DOTS_UP_TO else ""
        if len(series.steps) > POINTS:
            series, low, high = series.thinned(POINTS)
            self.axes.fill_between(
                series.steps, low.values, high.values, color=colour, alpha=0.22, linewidth=0, label="_"
            )
        self.axes.plot(series.steps, series.values, color=colour, label=label, linestyle=style, marker=marker)

    def shade(self, steps: Sequence[int]) -> None:
        """Mark these steps in the background, neighbouring ones together."""
        known = set(steps)
        begins, ends = (sorted(step for step in known if step + by not in known) for by in (-1, 1))
        for first, last in zip(begins, ends, strict=True):
            self.axes.axvspan(first - 0.5, last + 0.5, color=FAINT, alpha=0.45, linewidth=0, zorder=0)

    def svg(self) -> str:
        """The figure as an SVG element, without an XML header."""
        target = io.StringIO()
        with self._matplotlib.rc_context(self._settings):
            self._legend()
            self._figure.savefig(
                target, format="svg", transparent=True, dpi=150, metadata={"Date": None, "Creator": None}
            )
        text = target.getvalue()
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, variable)
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r"font-family: [^;\"]*;?", "", text)
        return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)

    def _legend(self) -> None:
        """Below the axes, where it hides nothing; a single line needs none."""
        handles, names = self.axes.get_legend_handles_labels()
        if len(handles) > 1:
            columns = 3 if max(map(len, names)) < 18 else 2
            rows = -(-len(handles) // columns)
            self.axes.set_position((0.13, 0.17 + 0.075 * rows, 0.84, 0.73 - 0.075 * rows))
            self._figure.legend(
                handles, names, loc="lower left", bbox_to_anchor=(0.1, -0.02), ncols=columns, columnspacing=1.2
            )
