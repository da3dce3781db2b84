"""Draws panels with matplotlib, as SVG that stands in a page: its colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from spec_plugin.commands.report.panels import Panel
from spec_plugin.commands.report.run import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _INK),
}
_DOTS_UP_TO = 80  # steps
POINTS = 400  # of a line; of more steps it shows medians


def draw(panel: Panel, salt: str, shaded: Sequence[int] = ()) -> tuple[str, str, str]:
    """A panel's figure.

    Args:
        panel: what is drawn.
        salt: makes its ids differ from those of the page's others of this title.
        shaded: steps that are marked in the background.

    Returns:
        Its title, an SVG element without an XML header, and a sentence on what it leaves out, or none.
    """
    import matplotlib  # not by who wants the numbers alone
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": f"{salt} {panel.title}"}):
        figure = Figure(figsize=(4.8, 2.8))
        axes = figure.add_axes((0.13, 0.15, 0.84, 0.75))
        axes.set(title=panel.title, ylabel=panel.unit, xlabel="trainer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        _shade(axes, set(shaded))
        _lines(axes, panel)
        if panel.level is not None:
            axes.axhline(panel.level, color=_INK, linewidth=0.8)
        if panel.log:
            axes.set_yscale("log")
        cut = "" if panel.log else _from_zero(axes, [line.series for line in panel.lines if line.series])
        _legend(figure, axes)
        return panel.title, _svg(figure), cut


def _lines(axes: Axes, panel: Panel) -> None:
    """Each series; of a long one medians, and how far its values lie from them."""
    for i, line in enumerate(panel.lines):
        colour, style = _COLOURS[i % len(_COLOURS)], line.style if i < len(_COLOURS) else "--"
        marker = "." if style == "-" and len(line.series.steps) <= _DOTS_UP_TO else ""
        middle, low, high = thinned(line.series, POINTS)
        if middle is not line.series:
            axes.fill_between(middle.steps, low.values, high.values, color=colour, alpha=0.22, linewidth=0, label="_")
        if middle:
            axes.plot(middle.steps, middle.values, color=colour, label=line.label, linestyle=style, marker=marker)


def thinned(series: Series, most: int) -> tuple[Series, Series, Series]:
    """At most so many values, each the median of neighbouring ones, with the smallest and the largest of these."""
    if len(series.steps) <= most:
        return series, series, series
    size = -(-len(series.steps) // most)
    places = range(0, len(series.steps), size)
    groups = {series.steps[i : i + size][-1 - size // 2 :][0]: series.values[i : i + size] for i in places}
    middle, low, high = (Series.of({step: of(group) for step, group in groups.items()}) for of in (median, min, max))
    return middle, low, high


def _shade(axes: Axes, steps: set[int]) -> None:
    """Neighbouring steps together."""
    begins, ends = (sorted(step for step in steps if step + by not in steps) for by in (-1, 1))
    for first, last in zip(begins, ends, strict=True):
        axes.axvspan(first - 0.5, last + 0.5, color=_FAINT, alpha=0.45, linewidth=0, zorder=0)


def _from_zero(axes: Axes, series: Sequence[Series]) -> str:
    """Start the axis at 0 if nothing is below; say what it leaves out where the first step would flatten the rest."""
    if any(v < 0 for one in series for v in one.values):
        return ""
    later = max((v for one in series for v in one.values[1:]), default=0.0)
    first, step = max((one.values[0], one.steps[0]) for one in series)
    cut = later > 0 and first > 2 * later
    axes.set_ylim(0, 1.25 * later if cut else 1.08 * max(first, later) or None)
    return f"Step {step}, which starts things up, reaches {first:.3g} and is cut off." if cut else ""


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, where it hides nothing; a single line needs none."""
    handles, names = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 3 if max(map(len, names)) < 18 else 2
        rows = -(-len(handles) // columns)
        axes.set_position((0.13, 0.17 + 0.075 * rows, 0.84, 0.73 - 0.075 * rows))
        figure.legend(handles, names, loc="lower left", bbox_to_anchor=(0.1, -0.02), ncols=columns, columnspacing=1.2)


def _svg(figure: Figure) -> str:
    target = io.StringIO()
    figure.savefig(target, format="svg", transparent=True, dpi=150, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
