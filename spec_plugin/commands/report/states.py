"""When a run speculated and why not: from ``spec/state`` and ``spec/reason``, and of an older run from what else it logged."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal

from spec_plugin.commands.report.run import LoggedRun
from spec_plugin.speculation import Reason, Speculation

State = Literal["on", "dropped", "off", "failed"]
_STATES: dict[float, State] = {
    Speculation.TRYING: "on",
    Speculation.SERVING: "on",
    Speculation.DROPPED: "dropped",
    Speculation.FAILED: "failed",
    Speculation.GIVEN_UP: "failed",
}
_MEANINGS = {float(code): code.meaning for code in Reason}
_NAMES = {float(code): code.name for code in Reason}
_UNKNOWN_TROUBLE = "a failure whose reason was not logged; the plugin's one warning in the console log names it"


@dataclass(frozen=True)
class StateSpan:
    """Neighbouring steps of one state for one reason."""

    first: int
    last: int
    state: State
    reason: str | None  # name of the code; None: it was not logged
    why: str

    @property
    def where(self) -> str:
        """``step 3`` or ``steps 3 to 8``."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def spans_of(run: LoggedRun) -> list[StateSpan]:
    """The states of a run with the plugin, in order; none of a run without."""
    spans: list[tuple[object, StateSpan]] = []
    for step in run.series("spec/failed").steps:
        state, code = _state(run, step), run.steps[step].get("spec/reason")
        known, why = _why(run, step, state, code)
        span = StateSpan(step, step, state, _NAMES.get(code) if code is not None else None, why)
        if spans and spans[-1][0] == (state, code, known):
            span = replace(span, first=spans.pop()[1].first)
        spans.append(((state, code, known), span))
    return [span for _, span in spans]


def _state(run: LoggedRun, step: int) -> State:
    values = run.steps[step]
    if (logged := values.get("spec/state")) is not None:
        return _STATES.get(logged, "off")
    if values.get("spec/failed"):
        return "failed"
    return "dropped" if values.get("spec/dropped") else "on" if values.get("spec/on") else "off"


def _why(run: LoggedRun, step: int, state: State, code: float | None) -> tuple[object, str]:
    """What is the same for the same reason, and the reason in words."""
    meaning = "" if code is None else _MEANINGS.get(code, f"code {code:g}, which this version does not know")
    values = run.steps[step]
    if state == "failed":
        for_good = values.get("spec/state") == Speculation.GIVEN_UP
        return for_good, (meaning or _UNKNOWN_TROUBLE) + ("; it is not tried again in this run" if for_good else "")
    if state == "dropped":
        made = values.get("spec/tokens_per_forward") or values.get("spec/acceptance_length")
        return None, f"the draft gave {_number(made)} tokens per forward pass{_pays_from(run, step)}"
    if state == "on":
        meaning = "" if code == Reason.PREDICTED_TO_PAY else meaning
        return None, ": ".join(text for text in (meaning, _table(run, step)) if text)
    if code not in (None, Reason.BELOW_BREAK_EVEN, Reason.COST_UNKNOWN):
        return None, meaning
    tried, known = _known(run, step)
    if not known:
        return None, meaning or Reason.NO_DRAFT_YET.meaning
    prices = _pays_from(run, step)
    return (tried, bool(prices)), ", ".join(known) + (prices or f"; {Reason.COST_UNKNOWN.meaning}")


def _known(run: LoggedRun, step: int) -> tuple[int | None, list[str]]:
    """What the run knew of its draft before this step: what it made when it was tried (when), and what training said since."""
    tried = run.drafted[: bisect_left(run.drafted, step)][-1:]
    expected = run.series("spec/expected_acceptance").before(step)
    shadow = run.series("spec/shadow_tokens_per_forward").before(step)
    known = []
    if tried:
        made = run.series("spec/tokens_per_forward").at(tried[0]) or run.series("spec/acceptance_length").at(tried[0])
        known.append(f"{_number(made)} tokens per forward pass were measured at step {tried[0]}")
    if expected is not None:
        known.append(f"training predicts {_number(expected)}" + ("" if tried else " tokens per forward pass"))
    if shadow is not None:
        known.append(f"a look-up of earlier text would have given {_number(shadow)}")
    return (tried[0] if tried else None), known


def _pays_from(run: LoggedRun, step: int) -> str:
    found = {b: series.before(step) or series.at(step) for b, series in run.family("spec/break_even_b").items()}
    parts = [f"{value:.2f} at batch size {size}" for size, value in found.items() if value]
    return f"; drafting pays from {', '.join(parts)}" if parts else ""


def _table(run: LoggedRun, step: int) -> str:
    ks = {size: series.at(step) for size, series in run.family("spec/k_b").items()}
    return ", ".join(f"k={k:.0f} at batch size {size}" for size, k in ks.items() if k is not None)


def _number(value: float | None) -> str:
    return "an unknown number of" if value is None else f"{value:.2f}"
