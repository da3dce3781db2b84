"""What else changed shortly before a step: said beside a fall of acceptance, as times that a person can check, not as a proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spec_plugin.commands.report.run import Run, Series
from spec_plugin.commands.report.shifts import shifts_of

_LOOK_BACK = 5  # steps
_NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Change:
    """Something else that changed."""

    step: int
    words: str


def nearby(run: Run, step: int, most: int = 2) -> str:
    """The last changes before a step, or in it: ``two steps after the learning rate rose from 1e-06 to 1e-05``; else empty."""
    recent = sorted((c for c in changes_of(run) if step - _LOOK_BACK <= c.step <= step), key=lambda c: -c.step)
    return " and ".join(f"{_when(step - change.step)} {change.words}" for change in recent[:most])


def changes_of(run: Run) -> Iterator[Change]:
    """What may move a draft's acceptance: the learning rate, k, refused refreshes, and levels of what the trainer logs."""
    yield from _jumps(run.series("lr"), "the learning rate", ".0e", 1.3)
    for size, series in run.family("spec/k_b").items():
        for change in _jumps(series, f"k with {size} at once", ".0f", 1.5):
            if "fell" in change.words:
                yield change
    refused = run.series("spec/refresh_refused")
    for i, step in enumerate(refused.steps[1:], 1):
        if refused.values[i] > refused.values[i - 1]:
            yield Change(step, "a refresh of the draft was refused")
    for name, words in _LEVELS.items():
        for shift in shifts_of(run.series(name), least=0.25):
            yield Change(
                shift.step, f"{words} {'fell' if shift.fell else 'rose'} from {shift.before:.3g} to {shift.after:.3g}"
            )


_LEVELS = {
    "entropy": "the policy's entropy",
    "response_tokens": "the length of responses",
    "grad_norm": "the policy's gradient norm",
    "spec/draft_loss": "the draft's loss",
    "spec/policy_lag": "the policy's lag",
}


def _jumps(series: Series, words: str, form: str, factor: float) -> Iterator[Change]:
    for i, step in enumerate(series.steps[1:], 1):
        before, after = series.values[i - 1], series.values[i]
        if before > 0 and (after > factor * before or after * factor < before):
            yield Change(step, f"{words} {'rose' if after > before else 'fell'} from {before:{form}} to {after:{form}}")


def _when(later: int) -> str:
    if later == 0:
        return "at the same step as"
    return f"{_NUMBERS[later]} step{'s' * (later > 1)} after"
