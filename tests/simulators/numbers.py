"""What each number of the break-even controller is worth: the same simulated runs with it half as large, twice, and without it.

A number that costs nothing either way is no reason to be there, and one whose mechanism costs nothing to leave out takes the
mechanism with it.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from statistics import fmean
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

from simulators import controller
from simulators.shown import Map, Shown


class Number(NamedTuple):
    """One constant of a module of ``spec_plugin``."""

    where: str
    name: str
    without: float | None = None  # the value at which what it is for does nothing
    above_one: bool = False  # a factor of which what is above 1 is halved and doubled

    @property
    def module(self) -> ModuleType:
        """Where it is read, at each run."""
        return import_module(f"spec_plugin.{self.where}")

    @property
    def value(self) -> float:
        """As it is."""
        found: float = getattr(self.module, self.name)
        return found

    def times(self, factor: float) -> float:
        """So many times as large."""
        if self.above_one:
            return 1.0 + factor * (self.value - 1.0)
        return max(1, round(factor * self.value)) if isinstance(self.value, int) else factor * self.value

    @property
    def shown(self) -> str:
        """With its module."""
        return f"`{self.where.removeprefix('policy.break_even.')}.{self.name}`"


NUMBERS = (
    Number("policy.break_even.plan", "MARGIN", without=1.0, above_one=True),
    Number("policy.break_even.plan", "_LOOKED_AT", without=1),
    Number("policy.break_even.controller", "_TRY_MARGIN", without=1.0, above_one=True),
    Number("policy.break_even.states", "REST"),
    Number("policy.break_even.outlook", "_LEAST"),
    Number("policy.break_even.outlook", "_IN_A_ROW", without=1),
    Number("policy.break_even.outlook", "_TEXTS", without=1.0),
    Number("policy.break_even.outlook", "_DOUBT", without=0.0),
    Number("policy.break_even.outlook", "_FIRST_LOOK"),
    Number("policy.break_even.outlook", "_LAST_LOOK"),
    Number("policy.break_even.acceptance", "_MIN_DRAFTS", without=1),
    Number("policy.break_even.acceptance", "_OUT_OF_DATE", without=math.inf),
    Number("policy.break_even.acceptance", "_COMPARABLE", without=math.inf, above_one=True),
    Number("policy.break_even.correction", "_KEPT"),
    Number("policy.break_even.correction", "_FEW", without=1),
    Number("policy.break_even.correction", "_SHORT", without=10**9),
    Number("policy.break_even.correction", "_MAY_COST"),
    Number("policy.break_even.correction", "_MOST_SHARE"),
    Number("policy.break_even.correction", "_HALVED_BY", without=math.inf),
    Number("step_cost.bands", "_MIDDLE", without=1.0),
    Number("step_cost.bands", "_EXACT"),
    Number("step_cost.model", "_MEMORY_PHASES", without=1),
    Number("step_cost.model", "_STEPS_OF_A_PHASE", without=10**9),
    Number("step_cost.model", "_PRIOR_STEPS", without=1e-9),
    Number("step_cost.model", "_IMPLAUSIBLE", without=0.0),
    Number("step_cost.model", "_OFF_BY", without=math.inf, above_one=True),
    Number("step_cost.model", "_LONGER", without=0.0),
    Number("step_cost.model", "_SMALL", without=1.0),
    Number("engine.vllm.schedule.cutoff", "_LOST", without=math.inf),
    Number("engine.vllm.schedule.cutoff", "_DRAFTS", without=0),
    Number("engine.vllm.schedule.cutoff", "_STEPS", without=0),
    Number("engine.vllm.schedule.cutoff", "_KEPT", without=1.0, above_one=True),
    Number("engine.vllm.schedule.pairs", "STEPS"),
    Number("engine.vllm.schedule.pairs", "_PATIENCE"),
    Number("engine.vllm.schedule.pairs", "_RANGE"),
)


#: runs of a small engine, and of one of sixteen with 1024 requests, where there is something to gain
_SMALL, _AT_SCALE = controller.TRUTHS, (controller.AT_SCALE[0], controller.AT_SCALE[2])


def a_run(index: int, number: Number | None, value: float, runs: int, phases: int, first: int) -> controller.Outcome:
    """One run with another number: truths in turn, ``runs`` seeds of each, from ``first`` on."""
    truth = (*_SMALL, *_AT_SCALE)[index // runs]
    with ExitStack() as changed:
        if number is not None:
            changed.enter_context(patch.object(number.module, number.name, value))
        return controller.run(truth, first + index % runs, min(phases, truth.phases or phases))


def numbers(mapped: Map, runs: int, phases: int) -> Shown:
    """The controller's truths, a hundredth as many runs of each, for each number."""
    of = max(1, runs // 100)
    small = of * len(_SMALL)
    every = range(small + of * len(_AT_SCALE))
    out = Shown(
        f"Numbers of the controller: seconds more than as it is, mean of {small} runs of {phases} phases / of "
        f"{len(every) - small} runs of 1024 requests of up to 16k tokens (the worst 50 phases in a row of all, against plain)",
        ("number", "it is", "half as large", "twice as large", "without it"),
    )

    def found(number: Number | None = None, value: float = 0.0, first: int = 0) -> list[controller.Outcome]:
        return list(mapped(partial(a_run, number=number, value=value, runs=of, phases=phases, first=first), every))

    usual = found()

    def shown(outcomes: list[controller.Outcome]) -> str:
        more = [o.ratio / u.ratio - 1.0 for o, u in zip(outcomes, usual, strict=True)]
        parts = f"{fmean(more[:small]):+.1%} / {fmean(more[small:]):+.1%}"
        return f"{parts} ({max(o.worst for o in outcomes):.3f})"

    out.rows.append(("none, other seeds", "", shown(usual), shown(found(first=1000)), shown(found(first=2000))))
    for number in NUMBERS:
        changed = [number.times(0.5), number.times(2.0), *([] if number.without is None else [number.without])]
        cells = [shown(found(number, value)) for value in changed]
        out.rows.append((number.shown, f"{number.value:g}", *cells, *[""] * (3 - len(cells))))
    return out
