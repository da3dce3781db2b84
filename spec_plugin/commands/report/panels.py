"""The report's figures: what a run has numbers for, and the same numbers of several runs together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from spec_plugin.commands.report import captions
from spec_plugin.commands.report.captions import Caption
from spec_plugin.commands.report.costs import percent, shares_of, stages_of
from spec_plugin.commands.report.figures import COLOURS, FAINT, INK, Canvas, shade
from spec_plugin.commands.report.run import Run, Series
from spec_plugin.commands.report.state import Span

_DOTS_UP_TO = 80  # steps
_NUMBERS_UP_TO = 24
_LETTERS = 27  # of a run's name in a legend
_POINTS = 400  # of a line; of more steps it shows medians
_LOG_PROBS = {
    "spec/logprob_diff_mean": ("mean", COLOURS[0], "-"),
    "spec/logprob_diff_plain": ("mean of plain text", COLOURS[1], ":"),
    "spec/logprob_diff_p9999": ("99.99 % below", COLOURS[2], "-"),
    "spec/logprob_diff_max": ("largest", COLOURS[3], "-"),
}


@dataclass(frozen=True)
class Panel:
    """One figure of the page."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Subject:
    """A run and what was made of it."""

    run: Run
    spans: tuple[Span, ...]

    def canvas(self, caption: Caption) -> Canvas:
        """An empty figure, in which the steps that did not draft throughout are shaded."""
        canvas = Canvas(caption.title, caption.unit, self.run.name)
        plain = [step for span in self.spans if span.state != "on" for step in range(span.first, span.last + 1)]
        shade(canvas.axes, plain)
        return canvas


def panels_of(run: Run, spans: tuple[Span, ...], alone: bool = True) -> list[Panel]:
    """All figures that the run has numbers for; if it is not alone, without those that ``together`` draws of all runs."""
    subject = Subject(run, spans)
    return [panel for draw in (_PANELS if alone else _PANELS[:-1]) for panel in draw(subject)]


def together(runs: Sequence[Run]) -> list[Panel]:
    """Several runs in the same figures, a colour for each; of asynchronous ones generation per token says nothing."""
    found, labels = [], short_names([run.name for run in runs])
    for name, caption in captions.LINES.items():
        series = {run.name: run.series(name) for run in runs if name != "ms_per_token" or not run.overlaps}
        if sum(map(bool, series.values())) < (1 if name.startswith("spec/") else 2):
            continue
        canvas = Canvas(caption.title, caption.unit, "together")
        for i, run in enumerate(runs):
            if run.name in series:
                _line(canvas, series[run.name], labels[i], COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--")
        found.append(_panel(caption, canvas, _from_zero(canvas, list(series.values()), name)))
    return found


def short_names(names: Sequence[str]) -> list[str]:
    """Names that a legend has room for: without what they all begin with, and without their middle; they still differ."""
    if max(map(len, names)) <= _LETTERS:
        return list(names)
    pairs = zip(min(names), max(names), strict=False)  # what these two begin with all do
    same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) if len(names) > 1 else ""
    begins = max(same.rfind(mark) for mark in "-_/. ") + 1
    short = [name if len(name) <= _LETTERS else _without_middle("…" + name[begins:]) for name in names]
    return [f"{i}: {name}" if short.count(name) > 1 else name for i, name in enumerate(short, 1)]


def _without_middle(name: str) -> str:
    """At most as many letters as a legend has room for, more of the beginning than of the end."""
    end = _LETTERS // 3
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - end - 1]}…{name[-end:]}"


def _panel(caption: Caption, canvas: Canvas, more: str = "") -> Panel:
    return Panel(caption.title, canvas.svg(), caption.text + more)


def _acceptance(subject: Subject) -> Iterator[Panel]:
    run = subject.run
    measured, promised = run.series("spec/acceptance_length"), run.series("spec/expected_acceptance")
    if not measured:
        return
    canvas = subject.canvas(captions.ACCEPTANCE)
    _line(canvas, measured, "measured", COLOURS[0])
    _line(canvas, promised, "promised by training", COLOURS[1], ":")
    sizes = list(run.family("spec/break_even_b").items())
    for i, (size, series) in enumerate(sizes if len(sizes) < 3 else [sizes[0], sizes[-1]]):
        _line(canvas, series, f"pays from, {size} at once", COLOURS[2 + i], "--")
    canvas.axes.axhline(1.0, color=INK, linewidth=0.8)
    yield _panel(captions.ACCEPTANCE, canvas, _from_zero(canvas, [measured, promised]))


def _positions(subject: Subject) -> Iterator[Panel]:
    positions, drafted = subject.run.family("spec/acceptance_pos_"), subject.run.drafted
    if not positions or not drafted:
        return
    canvas = Canvas(captions.POSITIONS.title, captions.POSITIONS.unit, subject.run.name)
    steps, wanted = range(drafted[0], drafted[-1] + 1), set(drafted)
    rows = [[(s.at(step) or 0.0) if step in wanted else math.nan for step in steps] for s in positions.values()]
    canvas.heat(rows, steps[0], [str(i + 1) for i in positions], 1.0, "share accepted")
    yield _panel(captions.POSITIONS, canvas)


def _speed(subject: Subject) -> Iterator[Panel]:
    predicted, realised = (subject.run.series(f"spec/speedup_{name}") for name in ("predicted", "realised"))
    if not predicted and not realised:
        return
    canvas = subject.canvas(captions.SPEED)
    _line(canvas, realised, "realised", COLOURS[0])
    _line(canvas, predicted, "predicted", COLOURS[1], ":")
    canvas.axes.axhline(1.0, color=INK, linewidth=0.8)
    late = captions.SPEED_LATE if subject.run.reports_late else ""
    yield _panel(captions.SPEED, canvas, late + _from_zero(canvas, [predicted, realised]))


def _ks(subject: Subject) -> Iterator[Panel]:
    family = subject.run.family("spec/k_b")
    if not family:
        return
    canvas = Canvas(captions.KS.title, captions.KS.unit, subject.run.name)
    steps = range(subject.run.numbers[0], subject.run.numbers[-1] + 1)
    failed = {s for span in subject.spans if span.state == "failed" for s in range(span.first, span.last + 1)}
    found = [[0.0 if step in failed else series.at(step) for step in steps] for series in family.values()]
    rows = [[math.nan if k is None else k for k in row] for row in found]
    top = max([1.0, *(k for row in rows for k in row if not math.isnan(k))])
    few = len(steps) <= _NUMBERS_UP_TO
    canvas.heat(rows, steps[0], [str(size) for size in family], top, "" if few else "k")
    if few:
        canvas.write(rows, steps[0], top)
    yield _panel(captions.KS, canvas)


def _draft(subject: Subject) -> Iterator[Panel]:
    loss, version = subject.run.series("spec/draft_loss"), subject.run.series("spec/draft_version")
    if loss:
        canvas = subject.canvas(captions.LOSS)
        _line(canvas, loss, "loss", COLOURS[0])
        yield _panel(captions.LOSS, canvas, _from_zero(canvas, [loss]))
    if version:
        canvas = subject.canvas(captions.VERSION)
        canvas.count_upwards()
        drawn, _, _ = version.thinned(_POINTS)
        canvas.axes.step(drawn.steps, drawn.values, where="post", color=COLOURS[0])
        yield _panel(captions.VERSION, canvas, _from_zero(canvas, [version]))


def _stages(subject: Subject) -> Iterator[Panel]:
    stages, numbers = stages_of(subject.run), subject.run.numbers
    if not stages:
        return
    canvas = subject.canvas(captions.STAGES)
    filled = [Series(numbers, tuple(series.at(step) or 0.0 for step in numbers)) for series in stages.values()]
    columns = [series.thinned(_POINTS)[0] for series in filled]
    colours = [FAINT if name == "other" else COLOURS[i] for i, name in enumerate(stages)]
    numbers, seconds = columns[0].steps, [series.values for series in columns]
    canvas.axes.stackplot(numbers, seconds, labels=list(stages), colors=colours, step="mid", alpha=0.75, linewidth=0)
    totals = Series(numbers, tuple(map(sum, zip(*seconds, strict=True))))
    ours = captions.STAGES_WITH if subject.run.has_plugin else ""
    yield _panel(captions.STAGES, canvas, ours + _from_zero(canvas, [totals]))


def _work(subject: Subject) -> Iterator[Panel]:
    shares = shares_of(subject.run)
    if not shares:
        return
    canvas = subject.canvas(captions.WORK)
    for i, share in enumerate(shares):
        _line(canvas, share.percent, share.name, COLOURS[i])
    whole = ", ".join(f"{share.name} {percent(share.whole)}" for share in shares)
    cut = _from_zero(canvas, [share.percent for share in shares])
    yield _panel(captions.WORK, canvas, f"Of the whole run's time: {whole}.{cut}")


def _log_probs(subject: Subject) -> Iterator[Panel]:
    run = subject.run
    known = {name: s for name in _LOG_PROBS if (s := _positive(run.series(name)))}
    if not known:
        return
    canvas = subject.canvas(captions.LOG_PROBS)
    for name, series in known.items():
        _line(canvas, series, *_LOG_PROBS[name])
    _line(canvas, _positive(run.series("spec/logprob_tolerance")), "tolerance of a text's mean", INK, "--")
    canvas.axes.set_yscale("log")
    yield _panel(captions.LOG_PROBS, canvas, captions.LOG_PROBS_OLDER if run.overlaps else "")


def _lag(subject: Subject) -> Iterator[Panel]:
    lag = subject.run.series("spec/policy_lag") or subject.run.series("staleness")
    if any(lag.values):
        canvas = subject.canvas(captions.LAG)
        _line(canvas, lag, "mean", COLOURS[0])
        yield _panel(captions.LAG, canvas, _from_zero(canvas, [lag]))


def _trainer(subject: Subject) -> Iterator[Panel]:
    for name in captions.LINES_ALONE:
        if series := subject.run.series(name):
            canvas = subject.canvas(captions.LINES[name])
            _line(canvas, series, name, COLOURS[0])
            yield _panel(captions.LINES[name], canvas, _from_zero(canvas, [series], name))


_PANELS: tuple[Callable[[Subject], Iterator[Panel]], ...] = (
    _acceptance,
    _positions,
    _speed,
    _ks,
    _draft,
    _stages,
    _work,
    _log_probs,
    _lag,
    _trainer,  # the last one: see ``panels_of``
)


def thinning(runs: Sequence[Run]) -> str:
    """What is to be said of the figures of long runs; else empty."""
    size = max(-(-len(run.numbers) // _POINTS) for run in runs)
    return captions.THINNED.format(size=size) if size > 1 else ""


def _line(canvas: Canvas, series: Series, name: str, colour: str, style: str = "-") -> None:
    """Draw one series, if it has anything; of a long one medians, and how far its values lie from them."""
    if series:
        marker = "." if len(series.steps) <= _DOTS_UP_TO else ""
        if len(series.steps) > _POINTS:
            series, low, high = series.thinned(_POINTS)
            canvas.axes.fill_between(
                series.steps, low.values, high.values, color=colour, alpha=0.22, linewidth=0, label="_"
            )
        canvas.axes.plot(series.steps, series.values, color=colour, label=name, linestyle=style, marker=marker)


def _positive(series: Series) -> Series:
    """What a logarithmic axis can show."""
    return series.only([step for step, value in series.pairs() if value > 0])


def _from_zero(canvas: Canvas, series: Sequence[Series], name: str = "") -> str:
    """Start the axis at 0 if nothing is below; say what it leaves out where the first step would flatten the rest."""
    if name == "lr":
        canvas.axes.yaxis.set_major_formatter("{x:.1e}")
    if any(v < 0 for one in series for v in one.values):
        return ""
    later = max((v for one in series for v in one.values[1:]), default=0.0)
    firsts = [(one.values[0], one.steps[0]) for one in series if one]
    first, step = max(firsts, default=(0.0, 0))
    cut = later > 0 and first > 2 * later
    canvas.axes.set_ylim(0, 1.25 * later if cut else 1.08 * max(first, later) or None)
    return f" Step {step}, which starts things up, reaches {first:.3g} and is cut off." if cut else ""
