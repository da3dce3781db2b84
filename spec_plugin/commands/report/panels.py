"""What the page's figures show: a run's numbers, and the same numbers of several runs together; as data, drawn in ``figures``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spec_plugin.commands.report.run import SIDE_BY_SIDE, LoggedRun, Series, only
from spec_plugin.commands.report.states import StateSpan

#: of log-probs: a metric, what its line is called, and its style
_DIFFERENCES = (
    ("diff_mean", "mean", "-"),
    ("diff_plain", "mean, plain text", ":"),
    ("diff_p9999", "99.99th percentile", "-"),
    ("diff_max", "largest", "-"),
    ("tolerance", "tolerance of the mean", "--"),
)


@dataclass(frozen=True)
class Line:
    """One series of a figure, what it is called, and matplotlib's name of its style."""

    series: Series
    label: str
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """A figure."""

    title: str  # by which ``page.html.j2`` knows its caption
    unit: str
    lines: tuple[Line, ...]
    level: float | None = None  # drawn across
    log: bool = False  # is the axis logarithmic; it has no place for a 0 then


def panels_of(run: LoggedRun, spans: Sequence[StateSpan]) -> Iterator[Panel]:
    """All figures that the run has numbers for."""
    for panel in (*_speculation(run, spans), *_work(run), *_guards(run)):
        if lines := tuple(line for line in panel.lines if line.series):
            yield replace(panel, lines=lines)


def together(runs: Sequence[LoggedRun]) -> Iterator[Panel]:
    """All runs in the same figures; of asynchronous ones generation per token says nothing.

    A run keeps its place among the lines, and so its colour; its series is empty where it has no such numbers. What the plugin
    logs has figures of each run, too, so these are drawn of several runs alone.
    """
    for name, (title, unit) in SIDE_BY_SIDE.items():
        series = [{} if name == "ms_per_token" and run.overlaps else _settled(run, name) for run in runs]
        if any(series) and not (len(runs) == 1 and name.startswith("spec/")):
            lines = tuple(Line(points, run.name) for points, run in zip(series, runs, strict=True))
            yield Panel(title[0].upper() + title[1:], unit, lines)


def _speculation(run: LoggedRun, spans: Sequence[StateSpan]) -> Iterator[Panel]:
    measured, sizes = run.series("spec/acceptance_length"), list(run.family("spec/break_even_b").items())
    if measured:
        ends = [Line(series, f"pays from, batch size {size}", "--") for size, series in [*sizes[:1], *sizes[1:][-1:]]]
        lines = (Line(measured, "measured"), Line(run.expected, "predicted by training", ":"), *ends)
        yield Panel("Acceptance length", "tokens per forward pass", lines, level=1.0)
    positions = run.family("spec/acceptance_pos_").items()
    lines = tuple(Line(only(series, run.drafted), f"token {i + 1}") for i, series in positions)
    yield Panel("Acceptance rate by position", "share accepted", lines)
    lines = tuple(Line(ks, f"batch size {size}") for size, ks in drafted_ks(run, spans).items())
    yield Panel("k by batch size", "tokens", lines)
    styles = {"realised": "-", "predicted": ":"}
    lines = tuple(Line(run.series(f"spec/speedup_{name}"), name, style) for name, style in styles.items())
    yield Panel("Decoding speed-up, predicted and realised", "x plain decoding", lines, level=1.0)


def drafted_ks(run: LoggedRun, spans: Sequence[StateSpan]) -> dict[int, Series]:
    """k by batch size, without the steps after a failure, in which the table that is logged is not in force."""
    failed = {step for span in spans if span.state == "failed" for step in range(span.first, span.last + 1)}
    return {size: only(ks, ks.keys() - failed) for size, ks in run.family("spec/k_b").items()}


def _work(run: LoggedRun) -> Iterator[Panel]:
    yield Panel("Draft: loss", "nats", (Line(run.draft_loss, "loss"),))
    took = _settled(run, "step_s")
    shares = {name: {s: 100 * spent.get(s, 0.0) / took[s] for s in took if took[s]} for name, spent in run.work.items()}
    yield Panel("The plugin's own work", "% of the step", tuple(Line(share, name) for name, share in shares.items()))
    saved, cost = run.sums_so_far
    yield Panel("Saved and spent so far", "seconds", (Line(saved, "saved"), Line(cost, "spent")))


def _settled(run: LoggedRun, name: str) -> Series:
    """A metric from the second step on: the first one's times, which start things up, would flatten all others."""
    return only(run.series(name), run.numbers[1:])


def _guards(run: LoggedRun) -> Iterator[Panel]:
    named = [(run.series(f"spec/logprob_{metric}"), label, style) for metric, label, style in _DIFFERENCES]
    lines = tuple(Line({s: v for s, v in series.items() if v > 0}, label, style) for series, label, style in named)
    if any(line.series for line in lines[:-1]):
        yield Panel("Log-probs: engine against actor", "nats", lines, log=True)
    lag = run.series("spec/policy_lag") or run.series("staleness")
    if any(lag.values()):
        yield Panel("Policy lag", "versions", (Line(lag, "mean"),))
