"""When a run speculated and why not: from ``spec/state`` and ``spec/reason``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

from spec_plugin.api.speculation import Reason, Speculation
from spec_plugin.commands.report.run import LoggedRun, Series, before

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
    codes = [(s, state, run.steps[s].get("spec/reason", -1.0)) for s, state in run.series("spec/state").items()]
    spans, known = [], _tokens_per_forward(run)
    for (state, code), same in groupby(codes, itemgetter(1, 2)):
        steps = [step for step, *_ in same]
        reason = _REASONS.get(code)
        why = f"code {code:g}, which this version does not know" if reason is None else reason.meaning
        if reason in (Reason.BELOW_BREAK_EVEN, Reason.COST_UNKNOWN):
            why += _at(known, steps[-1])
        elif state == Speculation.GIVEN_UP:
            why += "; it is not tried again in this run"
        name = None if reason is None else reason.name
        spans.append(StateSpan(steps[0], steps[-1], _STATES.get(state, "off"), name, why))
    return spans


def _tokens_per_forward(run: LoggedRun) -> dict[str, Series]:
    """What drafts were known to make, and from how many tokens on drafting pays, each by the step behind which it was known."""
    made = run.series("spec/tokens_per_forward")
    known = {
        # of a step itself; the others are what was known before it
        "measured": {step - 1: tokens for step, tokens in made.items() if tokens > 1.0},
        "predicted by training": run.expected,
        "by a look-up of earlier text": run.series("spec/shadow_tokens_per_forward"),
    }
    sizes = run.family("spec/break_even_b").items()
    return known | {f"needed at batch size {size}": pays_from for size, pays_from in sizes}


def _at(known: dict[str, Series], step: int) -> str:
    """What was known at a step, in brackets; or nothing."""
    values = {name: before(series, step) for name, series in known.items()}
    parts = ", ".join(f"{tokens:.2f} {name}" for name, tokens in values.items() if tokens)
    return f" (tokens per forward pass: {parts})" if parts else ""
