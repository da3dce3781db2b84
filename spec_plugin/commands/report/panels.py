"""The report's figures: what a run has numbers for, and the same numbers of several runs together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spec_plugin.commands.report.figures import COLOURS, INK, POINTS, Canvas
from spec_plugin.commands.report.run import LoggedRun, Series, percent, shares_of
from spec_plugin.commands.report.states import StateSpan

#: of a run's name in a legend
_LETTERS = 27
#: what several runs are drawn of together
_TOGETHER = {
    "ms_per_token": ("Generation, per token", "ms"),
    "generation_s": ("Generation that the trainer waits for", "seconds"),
    "step_s": ("Whole step", "seconds"),
    "spec/acceptance_length": ("Acceptance length", "tokens per forward pass"),
    "spec/speedup_realised": ("Decoding speed-up, realised", "x plain decoding"),
    "reward": ("Reward", "mean"),
}
#: a series, what its line is called, and its style
Line = tuple[Series, str, str]


@dataclass(frozen=True)
class Panel:
    """A figure of the page, as SVG, with its caption."""

    title: str
    svg: str
    caption: str


def panels_of(run: LoggedRun, spans: Sequence[StateSpan]) -> list[Panel]:
    """All figures that the run has numbers for."""
    return [*_acceptance(run, spans), *_speed(run, spans), *_draft(run, spans), *_guards(run, spans)]


def together(runs: Sequence[LoggedRun]) -> list[Panel]:
    """Several runs in the same figures, a colour for each; of asynchronous ones generation per token says nothing."""
    found, labels = [], short_names([run.name for run in runs])
    for name, (title, unit) in _TOGETHER.items():
        shown = [r for r in runs if r.series(name) and not (name == "ms_per_token" and r.overlaps)]
        if len(shown) < (1 if name.startswith("spec/") else 2):
            continue
        canvas = Canvas(title, unit, "together")
        for i, run in enumerate(runs):
            if run in shown:
                canvas.line(run.series(name), labels[i], COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--")
        cut = _from_zero(canvas, [run.series(name) for run in shown])
        found.append(Panel(title, canvas.svg(), cut))
    return found


def short_names(names: Sequence[str]) -> list[str]:
    """Names that a legend has room for: long ones by their number and their end."""
    return [n if len(n) <= _LETTERS else f"{i}: …{n[5 - _LETTERS :]}" for i, n in enumerate(names, 1)]


def thinning(runs: Sequence[LoggedRun]) -> str:
    """What is to be said of the figures of long runs; else empty."""
    size = max(-(-len(run.numbers) // POINTS) for run in runs)
    return (
        f"Of many steps, a line shows the median of {size} neighbouring ones; what is light around it reaches from the smallest "
        "to the largest of them."
        if size > 1
        else ""
    )


def _panel(
    run: LoggedRun,
    spans: Sequence[StateSpan],
    title: str,
    unit: str,
    text: str,
    lines: Sequence[Line],
    level: float | None = None,
    log: bool = False,
) -> Iterator[Panel]:
    """Lines that have numbers, and one across at ``level``; steps are shaded that did not draft throughout."""
    if not (lines := [line for line in lines if line[0]]):
        return
    canvas = Canvas(title, unit, run.name)
    canvas.shade([step for span in spans if span.state != "on" for step in range(span.first, span.last + 1)])
    for (series, label, style), colour in zip(lines, COLOURS, strict=False):
        canvas.line(series, label, colour, style)
    if level is not None:
        canvas.axes.axhline(level, color=INK, linewidth=0.8)
    if log:
        canvas.axes.set_yscale("log")
    cut = "" if log else _from_zero(canvas, [series for series, _, _ in lines])
    yield Panel(title, canvas.svg(), text + cut)


def _acceptance(run: LoggedRun, spans: Sequence[StateSpan]) -> Iterator[Panel]:
    measured, sizes = run.series("spec/acceptance_length"), _ends(run.family("spec/break_even_b"))
    lines = [(measured, "measured", "-"), (run.series("spec/expected_acceptance"), "predicted by training", ":")]
    lines += [(series, f"pays from, batch size {size}", "--") for size, series in sizes]
    text = (
        "Tokens that come from each forward pass of the policy; 1 is no gain. Drafting pays above the dashed lines. "
        "A step's prediction is for the next one's draft."
    )
    if measured:
        yield from _panel(run, spans, "Acceptance length", "tokens per forward pass", text, lines, level=1.0)
    positions = run.family("spec/acceptance_pos_").items()
    lines = [(series.only(run.drafted), f"token {i + 1}", "-") for i, series in positions]
    text = "How often the first, second, … drafted token was accepted. What was not drafted counts as not accepted."
    yield from _panel(run, spans, "Acceptance rate by position", "share accepted", text, lines)
    drafted = drafted_ks(run, spans)
    text = "Tokens drafted for a request in a step, as chosen for each batch size; the engine follows it as the batch drains."
    yield from _panel(run, spans, "k by batch size", "tokens", text, [(k, f"batch size {b}", "-") for b, k in drafted])


def drafted_ks(run: LoggedRun, spans: Sequence[StateSpan]) -> list[tuple[int, Series]]:
    """k by batch size, without the steps after a failure, in which the table that is logged is not in force."""
    failed = {step for span in spans if span.state == "failed" for step in range(span.first, span.last + 1)}
    return [(size, ks.only([s for s in ks.steps if s not in failed])) for size, ks in run.family("spec/k_b").items()]


def _ends(family: Mapping[int, Series]) -> list[tuple[int, Series]]:
    """The smallest and the largest of a family."""
    return [pair for i, pair in enumerate(family.items()) if i in (0, len(family) - 1)]


def _speed(run: LoggedRun, spans: Sequence[StateSpan]) -> Iterator[Panel]:
    predicted, realised = (run.series(f"spec/speedup_{name}") for name in ("predicted", "realised"))
    text = (
        "By the engine's own step times; plain decoding is 1. A whole rollout gains less: prefill and waiting are in it, too. "
        "A predicted 1 is a try, for which nothing was predicted."
    )
    if run.reports_late:
        text += " The prediction is for the rollout in progress; what it realised is logged a step later."
    lines = [(realised, "realised", "-"), (predicted, "predicted", ":")]
    yield from _panel(
        run, spans, "Decoding speed-up, predicted and realised", "x plain decoding", text, lines, level=1.0
    )


def _draft(run: LoggedRun, spans: Sequence[StateSpan]) -> Iterator[Panel]:
    text = "Loss of each slice of draft training. It grows when the policy moves, and changes when prompts no longer teach."
    yield from _panel(run, spans, "Draft: loss", "nats", text, [(run.series("spec/draft_loss"), "loss", "-")])
    shares = shares_of(run)
    text = f"Of the whole run's time: {', '.join(f'{share.name} {percent(share.whole)}' for share in shares)}."
    lines = [(share.percent, share.name, "-") for share in shares]
    yield from _panel(run, spans, "The plugin's own work", "% of the step", text, lines)


def _guards(run: LoggedRun, spans: Sequence[StateSpan]) -> Iterator[Panel]:
    text = "Differences of the log-probs that enter the loss. The tolerance is for the mean of a window of text."
    if run.overlaps:
        text += (
            " It holds for text of the present policy; older text differs by what the policy has moved, and is held against "
            "plain text of the same age."
        )
    lines = [
        (_positive(run.series("spec/logprob_diff_mean")), "mean", "-"),
        (_positive(run.series("spec/logprob_diff_plain")), "mean, plain text", ":"),
        (_positive(run.series("spec/logprob_diff_p9999")), "99.99th percentile", "-"),
        (_positive(run.series("spec/logprob_diff_max")), "largest", "-"),
        (_positive(run.series("spec/logprob_tolerance")), "tolerance of the mean", "--"),
    ]
    if any(series for series, _, _ in lines[:-1]):
        yield from _panel(run, spans, "Log-probs: engine against actor", "nats", text, lines, log=True)
    lag = run.series("spec/policy_lag") or run.series("staleness")
    text = "Policy versions between sampling and training, mean of the step's tokens."
    if any(lag.values):
        yield from _panel(run, spans, "Policy lag", "versions", text, [(lag, "mean", "-")])


def _positive(series: Series) -> Series:
    """Without zeros, which a logarithmic axis cannot show."""
    return series.only([step for step, value in series.pairs() if value > 0])


def _from_zero(canvas: Canvas, series: Sequence[Series]) -> str:
    """Start the axis at 0 if nothing is below; say what it leaves out where the first step would flatten the rest."""
    if any(v < 0 for one in series for v in one.values):
        return ""
    later = max((v for one in series for v in one.values[1:]), default=0.0)
    first, step = max(((one.values[0], one.steps[0]) for one in series), default=(0.0, 0))
    cut = later > 0 and first > 2 * later
    canvas.axes.set_ylim(0, 1.25 * later if cut else 1.08 * max(first, later) or None)
    return f" Step {step}, which starts things up, reaches {first:.3g} and is cut off." if cut else ""
