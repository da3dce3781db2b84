"""Draws panels with matplotlib, as SVG that stands in a page: its colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from spec_plugin.commands.report.panels import Panel
from spec_plugin.commands.report.states import StateSpan

#: colours that stand for the page's variables: nothing else is drawn with them
_INK, _FAINT = "#00f001", "#00f002"
_COLOURS = tuple(f"#00f0{16 + i:02x}" for i in range(8))
_VARIABLES = {_INK: "var(--ink)", _FAINT: "var(--faint)", **{c: f"var(--c{i})" for i, c in enumerate(_COLOURS)}}
_SETTINGS = {
    "svg.fonttype": "none",  # the page's fonts
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "path.simplify_threshold": 1.0,  # of a pixel: what a line of thousands of steps leaves out
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _INK),
}
_DOTS_UP_TO = 80  # steps
_LETTERS = 60  # of a legend, side by side


def draw(panel: Panel, salt: str, spans: Sequence[StateSpan] = ()) -> str:
    """A panel's figure, an SVG element without an XML header.

    Args:
        panel: what is drawn.
        salt: makes its ids differ from those of the page's others of this title.
        spans: of the run; those that did not draft to their end are marked in the background.
    """
    import matplotlib  # not by who wants the numbers alone
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": f"{salt} {panel.title}"}):
        figure = Figure(figsize=(4.8, 2.8), layout="constrained")
        axes = figure.subplots()
        axes.set(title=panel.title, ylabel=panel.unit, xlabel="trainer step", yscale="log" if panel.log else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if spans:  # in one call: of a run that goes on and off there are thousands
            ends = [end for span in spans for end in (span.first - 0.5, span.last + 0.5)]
            shaded = [span.state != "on" for span in spans for _ in range(2)]
            across = axes.get_xaxis_transform()
            axes.fill_between(
                ends, 0, 1, where=shaded, transform=across, color=_FAINT, alpha=0.45, linewidth=0, zorder=0
            )
        for i, line in enumerate(panel.lines):
            colour, style = _COLOURS[i % len(_COLOURS)], line.style if i < len(_COLOURS) else "--"
            marker = "." if style == "-" and len(line.series) <= _DOTS_UP_TO else ""
            if points := line.series:
                axes.plot([*points], [*points.values()], f"{marker}{style}", color=colour, label=line.label)
        if panel.level is not None:
            axes.axhline(panel.level, color=_INK, linewidth=0.8)
        if len(labels := axes.get_legend_handles_labels()[1]) > 1:
            columns = max(1, _LETTERS // (max(map(len, labels)) + 6))  # a sample of the line is as long as six letters
            figure.legend(loc="outside lower left", ncols=columns, columnspacing=1.2)
        if axes.dataLim.ymin >= 0.0 and not panel.log:
            axes.set_ylim(bottom=0.0)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, dpi=150, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
