"""When a run speculated and why not: from ``spec/state`` and ``spec/reason``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal

from spec_plugin.api.speculation import Reason, Speculation
from spec_plugin.commands.report.run import LoggedRun

State = Literal["on", "dropped", "off", "failed"]
_STATES: dict[float, State] = {Speculation.TRYING: "on", Speculation.SERVING: "on", Speculation.DROPPED: "dropped"}
_STATES |= {Speculation.FAILED: "failed", Speculation.GIVEN_UP: "failed"}
_REASONS = {float(code): code for code in Reason}


@dataclass(frozen=True)
class StateSpan:
    """Neighbouring steps of one state for one reason."""

    first: int
    last: int
    state: State
    reason: str | None  # name of the code; None: this version does not know it
    why: str

    @property
    def where(self) -> str:
        """``step 3`` or ``steps 3 to 8``."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def spans_of(run: LoggedRun) -> list[StateSpan]:
    """The states of a run with the plugin, in order; none of a run without."""
    spans: list[tuple[object, StateSpan]] = []
    for step, state in run.series("spec/state").pairs():
        code = run.steps[step].get("spec/reason", -1.0)
        reason, kind, tried = _REASONS.get(code), _STATES.get(state, "off"), None
        if kind == "dropped":
            why = f"the draft gave {_made(run, step)} tokens per forward pass{_pays_from(run, step)}"
        elif reason is None:
            why = f"code {code:g}, which this version does not know"
        elif reason in (Reason.BELOW_BREAK_EVEN, Reason.COST_UNKNOWN):
            tried, why = _does_not_pay(run, step, reason)
        else:
            why = reason.meaning + "; it is not tried again in this run" * (state == Speculation.GIVEN_UP)
        span = StateSpan(step, step, kind, None if reason is None else reason.name, why)
        if spans and spans[-1][0] == (state, code, tried):
            span = replace(span, first=spans.pop()[1].first)
        spans.append(((state, code, tried), span))
    return [span for _, span in spans]


def _does_not_pay(run: LoggedRun, step: int, reason: Reason) -> tuple[int, str]:
    """When the draft was last tried (0: never), and what was known of it before this step."""
    tried = [0, *run.drafted[: bisect_left(run.drafted, step)]][-1]
    known = [f"{_made(run, tried)} tokens per forward pass were measured at step {tried}"] if tried else []
    if (expected := run.expected.before(step)) is not None:
        known.append(f"training predicts {expected:.2f}" + " tokens per forward pass" * (not tried))
    if (shadow := run.series("spec/shadow_tokens_per_forward").before(step)) is not None:
        known.append(f"a look-up of earlier text would have given {shadow:.2f}")
    return tried, ": ".join(filter(None, (reason.meaning, ", ".join(known)))) + _pays_from(run, step)


def _made(run: LoggedRun, step: int) -> str:
    made = run.series("spec/tokens_per_forward").at(step) or run.series("spec/acceptance_length").at(step)
    return f"{made:.2f}" if made else "an unknown number of"


def _pays_from(run: LoggedRun, step: int) -> str:
    found = {b: series.before(step) or series.at(step) for b, series in run.family("spec/break_even_b").items()}
    parts = [f"{value:.2f} at batch size {size}" for size, value in found.items() if value]
    return f"; drafting pays from {', '.join(parts)}" if parts else ""
