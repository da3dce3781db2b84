"""When a run speculated and, where it did not, why: from its metrics, and the plugin's own lines where they are at hand."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from spec_plugin.commands.report.run import Notice, Run

State = Literal["on", "dropped", "off", "failed"]
#: words of the one warning with which speculation goes off for good
FAILED = "speculation is off from here on"
_BRAKE = "whole rollouts were slower"


@dataclass(frozen=True)
class Span:
    """Neighbouring steps of one state for one reason."""

    first: int
    last: int
    state: State
    why: str

    @property
    def where(self) -> str:
        """For people."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def spans_of(run: Run) -> list[Span]:
    """The states of a run with the plugin, in order; none of a run without."""
    spans: list[tuple[str, Span]] = []
    for step in run.series("spec/failed").steps:
        state = _state(run, step)
        kind, why = _reason(run, step, state)
        if spans and spans[-1][0] == kind and spans[-1][1].state == state:
            spans[-1] = (kind, Span(spans[-1][1].first, step, state, why if state != "failed" else spans[-1][1].why))
        else:
            spans.append((kind, Span(step, step, state, why)))
    return [span for _, span in spans]


def _state(run: Run, step: int) -> State:
    values = run.steps[step]
    if values.get("spec/failed"):
        return "failed"
    if values.get("spec/dropped"):
        return "dropped"
    return "on" if values.get("spec/on") else "off"


def _reason(run: Run, step: int, state: State) -> tuple[str, str]:
    """A word that is the same for the same reason, and the reason."""
    values = run.steps[step]
    if state == "on":
        return "on", _table(run, step)
    if state == "failed":
        said = _notice(run, step, FAILED)
        return "failed", said or "draft trouble; the console log has the one warning that says which"
    if state == "dropped":
        made = values.get("spec/tokens_per_forward") or values.get("spec/acceptance_length")
        return "dropped", f"the draft made {_number(made)} tokens per forward pass{_pays_from(run, step)}"
    if said := _notice(run, step, _BRAKE, within=8):
        return "brake", said
    return _not_promised(run, step)


def _not_promised(run: Run, step: int) -> tuple[str, str]:
    """What the run knew of its draft before this step: what it made when it was tried, and what training said since."""
    tried = run.drafted[: bisect_left(run.drafted, step)][-1:]
    expected = run.series("spec/expected_acceptance").before(step)
    shadow = run.series("spec/shadow_tokens_per_forward").before(step)
    known = []
    if tried:
        made = run.series("spec/tokens_per_forward").at(tried[0]) or run.series("spec/acceptance_length").at(tried[0])
        known.append(f"drafts last made {_number(made)} tokens per forward pass, at step {tried[0]}")
    if expected is not None:
        known.append(f"training promised {_number(expected)}" + (" then" if tried else " tokens per forward pass"))
    if shadow is not None:
        known.append(f"a look-up would have made {_number(shadow)}")
    if not known:
        return "new", "no draft had been trained, and none measured yet"
    if not _break_even(run, step):
        return "unmeasured", f"{', '.join(known)}; what drafting costs here was not measured"
    return f"known {tried}", ", ".join(known) + _pays_from(run, step)


def _break_even(run: Run, step: int) -> dict[int, float]:
    stem = "spec/break_even_b"
    found = {size: series.before(step) or series.at(step) for size, series in run.family(stem).items()}
    return {size: value for size, value in found.items() if value}


def _pays_from(run: Run, step: int) -> str:
    sizes = _break_even(run, step)
    if not sizes:
        return ""
    parts = [f"{_number(value)} with {size} at once" for size, value in sorted(sizes.items())]
    return f"; drafting pays from {', '.join(parts)}"


def _table(run: Run, step: int) -> str:
    ks = {size: series.at(step) for size, series in run.family("spec/k_b").items()}
    return ", ".join(f"k={k:.0f} with {size} at once" for size, k in ks.items() if k is not None)


def _notice(run: Run, step: int, words: str, within: int | None = None) -> str:
    """The last notice with these words up to a step, or of the few steps before it."""
    said = [n.text for n in run.notices if words in n.text and _is_before(n, step, within)]
    if not said and within is None:  # of a log without step lines: it is the one, if there is only one
        said = list({n.text for n in run.notices if words in n.text and n.step is None})
        said = said if len(said) == 1 else []
    return said[-1].partition(f"{words}, training goes on plain; ")[2] or said[-1] if said else ""


def _is_before(notice: Notice, step: int, within: int | None) -> bool:
    return notice.step is not None and notice.step <= step and (within is None or notice.step > step - within)


def _number(value: float | None) -> str:
    return "an unknown number of" if value is None else f"{value:.2f}"
