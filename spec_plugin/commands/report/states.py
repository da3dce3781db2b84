"""When a run speculated and why not: from ``spec/state`` and ``spec/reason``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

from spec_plugin.api.speculation import Reason, Speculation
from spec_plugin.commands.report.run import LoggedRun, before

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
    spans = []
    for (state, code), same in groupby(codes, itemgetter(1, 2)):
        steps = [step for step, *_ in same]
        reason = _REASONS.get(code)
        why = f"code {code:g}, which this version does not know" if reason is None else reason.meaning
        if reason in (Reason.BELOW_BREAK_EVEN, Reason.COST_UNKNOWN):
            why += _per_forward_pass(run, steps[-1])
        elif state == Speculation.GIVEN_UP:
            why += "; it is not tried again in this run"
        name = None if reason is None else reason.name
        spans.append(StateSpan(steps[0], steps[-1], _STATES.get(state, "off"), name, why))
    return spans


def _per_forward_pass(run: LoggedRun, step: int) -> str:
    """The tokens that a step's draft was known to make, and from how many on drafting pays, in brackets; or nothing."""
    measured = {s: made for s, made in run.series("spec/tokens_per_forward").items() if made > 1.0}
    known = {
        "measured": before(measured, step + 1),
        "predicted by training": before(run.expected, step),
        "by a look-up of earlier text": before(run.series("spec/shadow_tokens_per_forward"), step),
    }
    for size, pays_from in run.family("spec/break_even_b").items():
        known[f"needed at batch size {size}"] = before(pays_from, step)
    parts = ", ".join(f"{tokens:.2f} {name}" for name, tokens in known.items() if tokens)
    return f" (tokens per forward pass: {parts})" if parts else ""
