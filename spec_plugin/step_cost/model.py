"""The cost model of law 7: seconds of a decoding step by batch size and k, learned from the engine's own steps.

A decoding step with b requests and k drafted tokens each runs one target forward over b * (k + 1) tokens and k draft
forwards over b tokens. The model is their sum: a target part that never falls with the number of tokens, a part that is
linear in the tokens of the KV cache, which attention reads once whatever k is, and a draft part that is linear in k and b.
In a mixture the target's part also follows the experts that the tokens touch: steep where a calibration has few batch sizes,
flat from some dozens of tokens on. On simulated steps of four mixtures (``tests/unit/test_cost_of_experts.py``; each measurement
3 % off) 11 of 3360 choices of k are then below 0.97 of plain, where 37 were.
The start-up calibration knows short contexts only, and responses grow: what was measured at one context is carried over to
the rollouts' by that second part. With the acceptance of each drafted position it predicts tokens per second, hence the speed-up
for each k and the break-even. All functions are pure; the engine is nowhere near.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from spec_plugin.events import StepTiming
from spec_plugin.step_cost.experts import Experts
from spec_plugin.step_cost.fit import MEMORY_STEPS, Cell, Fit

#: a measured cell counts against the fitted surface like this many steps
_PRIOR_STEPS = 8
#: what earlier phases measured is forgotten when newer ones make so many steps, and are so many
_MEMORY_PHASES = 8
#: a speculating step that is measured below this share of a plain one cannot be right
_IMPLAUSIBLE = 0.5
#: contexts of a rollout that are longer than the calibration's by less than this factor cost about what those did
_LONGER = 2.0
#: what the newest phase weighs in the context of a batch size
_NEWEST = 0.5


class StepCost(Protocol):
    """Seconds of decoding steps, whether they were measured (``CostModel``) or are projected (``projection.Roofline``)."""

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        """Seconds of one step with ``batch`` requests; arguments as for ``CostModel.seconds``."""
        ...


class Corrected:
    """A cost model whose drafted steps take ``factor`` times as long."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost, self._factor = cost, factor

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        """See ``StepCost``."""
        return self._cost.seconds(batch, k, paused, context) * (self._factor if k else 1.0)


class CostModel:
    """Seconds of a decoding step by batch size and k; ``observe`` what the engine measured, then ask."""

    def __init__(self, experts: Experts | None = None) -> None:
        """Nothing is known yet.

        Args:
            experts: of the target, where it has some; see the module's first lines.
        """
        self.experts = experts
        self._seen: dict[tuple[int, int, bool], list[Cell]] = {}  # by batch, k, paused: the latest phases, oldest first
        self._cells: dict[tuple[int, int, bool], Cell] = {}
        self._contexts: dict[int, float] = {}  # of the rollouts, by batch size
        self._calibrated = 0.0  # tokens of the longest context that was calibrated
        self._fit: Fit | None = None

    def observe(self, timings: Sequence[StepTiming], calibration: bool = False) -> None:
        """Learn from steps of the engine; what makes no sense (not finite, not positive) is left out.

        Args:
            timings: the engine's step log.
            calibration: these steps are no rollout's, and say nothing of how long contexts are there.
        """
        before = dict(self._cells)
        for t in timings:
            if not _makes_sense(t):
                continue
            # a paused draft drafts nothing, whatever a calibration's file says
            key = (t.batch, t.k, t.paused and not t.k)
            seen = self._seen.setdefault(key, [])
            seen.append(Cell(t.seconds, t.steps, t.context))
            while len(seen) > _MEMORY_PHASES and sum(cell.steps for cell in seen[1:]) >= MEMORY_STEPS:
                del seen[0]
            self._cells[key] = _together(seen)
            self._calibrated = max(self._calibrated, t.context * calibration)
            if t.context > 0 and not calibration:
                known = self._contexts.get(t.batch, t.context)
                self._contexts[t.batch] = _NEWEST * t.context + (1 - _NEWEST) * known
        if self._cells != before:
            self._fit = None
        self._forget_contradictions()

    def at_usual_speed(self, timings: Sequence[StepTiming]) -> tuple[StepTiming, ...]:
        """Steps of one rollout as they would have been, had the machine been as fast as it usually is.

        A shared machine is faster or slower from one rollout to the next, and plain steps and drafted ones come from different
        rollouts. So only what a rollout says of some kinds of steps *against others* is news; the very first one's is taken as
        it is where contexts are much longer than in the calibration. Plain steps against drafted ones: ``judge``.
        """
        known = [t for t in timings if _makes_sense(t)]
        longest = max((t.context for t in known), default=0.0)
        alike = bool(self._contexts) or 0.0 < longest <= _LONGER * self._calibrated
        if not alike or self.problem is not None:
            return tuple(timings)
        slow = sorted(
            (t.seconds / self.seconds(t.batch, t.k, t.paused, t.context or None), t.seconds * t.steps) for t in known
        )
        half, passed, usual = sum(weight for _, weight in slow) / 2, 0.0, 1.0
        for factor, weight in slow:
            passed, usual = passed + weight, factor
            if passed >= half:
                break
        return tuple(replace(t, seconds=t.seconds / usual) for t in timings)

    def _forget_contradictions(self) -> None:
        """Leave out the batch sizes at which the timings contradict themselves, as long as others are left to go by.

        Something else had the machine then. Where the rollouts do not come to such a size, nothing would ever set it right.
        """
        kinds: dict[int, set[bool]] = {}
        for batch, k, _ in self._cells:
            kinds.setdefault(batch, set()).add(k > 0)
        while all(self._both_kinds()) and (found := next(self._implausible(), None)):
            left = [batch for batch, seen in kinds.items() if batch != found[0] and len(seen) == 2]
            if not left:
                return
            del kinds[found[0]]
            for key in [key for key in self._cells if key[0] == found[0]]:
                del self._cells[key], self._seen[key]
            self._fit = None

    def _both_kinds(self) -> tuple[bool, bool]:
        """Was a plain step timed, and a speculating one."""
        return any(k == 0 for _, k, _ in self._cells), any(k > 0 for _, k, _ in self._cells)

    def _implausible(self) -> Iterator[tuple[int, int, float]]:
        """Batch size, k and share of a plain step, of speculating ones that cannot be so fast."""
        for batch, k, _ in list(self._cells):
            if k > 0:
                cell = self._cells[batch, k, False]
                ratio = cell.seconds / self._at(batch, 0, True, cell.context)
                if not ratio > _IMPLAUSIBLE:
                    yield batch, k, ratio

    @property
    def problem(self) -> str | None:
        """Why the model must not be believed yet; None when it may be."""
        plain, speculating = self._both_kinds()
        if not plain or not speculating:
            return "no plain step was timed" if not plain else "no speculating step was timed"
        for batch, k, ratio in self._implausible():
            return (
                f"a step with k={k} at batch size {batch} seems to take {ratio:.3g} of the time of a plain one: "
                "the timings contradict each other"
            )
        return None

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        """Predicted seconds of one step: the fitted surface, corrected by what was measured in this very cell.

        Args:
            batch: requests in the step.
            k: drafted tokens of each.
            paused: with k = 0, is the draft's forward pass left out. k > 0 never pauses.
            context: tokens that each request has in the KV cache; None: as the rollouts have shown.

        Raises:
            RuntimeError: if nothing was observed.
        """
        held = self.context(batch) if context is None else context
        return self._at(batch, k, paused and k == 0, held)

    def context(self, batch: int) -> float:
        """Tokens that a request has in the KV cache when so many run, as far as the rollouts have shown."""
        if self._contexts:
            return self._contexts[min(self._contexts, key=lambda b: abs(math.log(b / batch)))]
        steps = sum(cell.steps for cell in self._cells.values())
        return sum(cell.context * cell.steps for cell in self._cells.values()) / steps if steps else 0.0

    def _at(self, batch: int, k: int, paused: bool, context: float) -> float:
        if self._fit is None:
            if not self._cells:
                raise RuntimeError("the cost model has seen no step yet")
            self._fit = Fit(self._cells, self.experts)
        fitted = self._fit.seconds(batch, k, paused, context)
        cell = self._cells.get((batch, k, paused))
        if cell is None:
            return fitted
        measured = cell.seconds * fitted / self._fit.seconds(batch, k, paused, cell.context)
        return (measured * cell.steps + fitted * _PRIOR_STEPS) / (cell.steps + _PRIOR_STEPS)

    def break_even(self, batch: int, k: int, paused: bool = True) -> float:
        """Acceptance length at which k drafted tokens give as many tokens per second as none, with the draft paused or not."""
        return self.seconds(batch, k, paused) / self.seconds(batch, 0, paused)


def positive(seconds: float) -> bool:
    """Are so many seconds a time that something may take."""
    return math.isfinite(seconds) and seconds > 0.0


def _makes_sense(t: StepTiming) -> bool:
    return t.batch >= 1 and t.k >= 0 and t.steps >= 1 and positive(t.seconds)


def _together(seen: Sequence[Cell]) -> Cell:
    """What several phases measured: the median by steps, so that one phase on a busy machine says nothing; of two the mean."""
    steps = sum(cell.steps for cell in seen)
    context = sum(cell.context * cell.steps for cell in seen) / steps
    if len(seen) < 3:
        return Cell(sum(cell.seconds * cell.steps for cell in seen) / steps, steps, context)
    passed, ordered = 0.0, sorted(seen, key=lambda cell: cell.seconds)
    for i, cell in enumerate(ordered):
        passed += cell.steps
        if passed > steps / 2:
            return Cell(cell.seconds, steps, context)
        if passed == steps / 2:
            return Cell((cell.seconds + ordered[i + 1].seconds) / 2, steps, context)
    raise AssertionError("no step was counted")
