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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from spec_plugin.builtin.break_even.experts import Experts
from spec_plugin.events import StepTiming

#: a measured cell counts against the fitted surface like this many steps
_PRIOR_STEPS = 8
#: what earlier phases measured is forgotten when newer ones make so many steps, and are so many
_MEMORY_STEPS, _MEMORY_PHASES = 64, 8
_HUBER = 0.05  # relative residual from which an observation loses weight
_SMOOTH = 1e-3  # weight of "neighbouring segments have the same slope", where nothing was measured between them
_SMOOTH_OF_EXPERTS = 1.0  # the same where the bend has a form: else noise would be taken for one
#: how unlike in the experts that they take the tokens of a step may be; what fits best is mixed of these
_EVENNESS = (1.0, 0.4)
#: a speculating step that is measured below this share of a plain one cannot be right
_IMPLAUSIBLE = 0.5
#: tokens by which contexts must differ before anything is said of what they cost; and by which factor
_CONTEXTS, _CONTEXT_FACTOR = 64.0, 2.0
#: what the newest phase weighs in the context of a batch size
_NEWEST = 0.5


class StepCost(Protocol):
    """Seconds of decoding steps, whether they were measured (``CostModel``) or are projected (``projection.Roofline``)."""

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        """Seconds of one step with ``batch`` requests; arguments as for ``CostModel.seconds``."""
        ...


def tokens_per_step(acceptance: Sequence[float], k: int) -> float:
    """Expected tokens of one verification step, bonus token included: 1 + the sum of the chances to come that far.

    Args:
        acceptance: chance that position i is accepted, given that those before it were; positions beyond take the last.
        k: drafted tokens.
    """
    tokens, reached = 1.0, 1.0
    for i in range(k):
        reached *= acceptance[min(i, len(acceptance) - 1)] if acceptance else 0.0
        tokens += reached
    return tokens


def closed_form_speedup(alpha: float, k: int, draft_cost: float) -> float:
    """Leviathan et al., arXiv 2211.17192, theorem 3.8: (1 - alpha^(k+1)) / ((1 - alpha)(k c + 1)).

    Args:
        alpha: chance that a drafted token is accepted, the same at every position.
        k: drafted tokens (their gamma).
        draft_cost: seconds of a draft forward / seconds of a target forward (their c), whatever the number of tokens.
    """
    tokens = k + 1.0 if alpha == 1.0 else (1 - alpha ** (k + 1)) / (1 - alpha)
    return tokens / (k * draft_cost + 1)


def constant_acceptance(length: float, k: int) -> float:
    """The alpha whose acceptance length at k is ``length``: the inverse of ``tokens_per_step`` with one alpha throughout."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step([middle], k) < length else (low, middle)
    return (low + high) / 2


def conditional_acceptance(accepted_per_pos: Sequence[int], drafts: int) -> tuple[float, ...]:
    """Chance that each position is accepted, given those before it, from vLLM's counts of accepted positions."""
    out, reached = [], drafts
    for accepted in accepted_per_pos:
        if reached == 0:
            break
        out.append(accepted / reached)
        reached = accepted
    return tuple(out)


class CostModel:
    """Seconds of a decoding step by batch size and k; ``observe`` what the engine measured, then ask."""

    def __init__(self, experts: Experts | None = None) -> None:
        """Nothing is known yet.

        Args:
            experts: of the target, where it has some; see the module's first lines.
        """
        self.experts = experts
        self._seen: dict[
            tuple[int, int, bool], list[_Cell]
        ] = {}  # by batch, k, paused: the latest phases, oldest first
        self._cells: dict[tuple[int, int, bool], _Cell] = {}
        self._contexts: dict[int, float] = {}  # of the rollouts, by batch size
        self._fit: _Fit | None = None

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
            key = (t.batch, t.k, t.paused)
            seen = self._seen.setdefault(key, [])
            seen.append(_Cell(t.seconds, t.steps, t.context))
            while len(seen) > _MEMORY_PHASES and sum(cell.steps for cell in seen[1:]) >= _MEMORY_STEPS:
                del seen[0]
            self._cells[key] = _together(seen)
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
        it is, since contexts are longer there than in the calibration. Plain steps against drafted ones: ``judge``.
        """
        if not self._contexts or self.problem is not None:
            return tuple(timings)
        known = [t for t in timings if _makes_sense(t)]
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
            self._fit = _Fit(self._cells, self.experts)
        fitted = self._fit.seconds(batch, k, paused, context)
        cell = self._cells.get((batch, k, paused))
        if cell is None:
            return fitted
        measured = cell.seconds * fitted / self._fit.seconds(batch, k, paused, cell.context)
        return (measured * cell.steps + fitted * _PRIOR_STEPS) / (cell.steps + _PRIOR_STEPS)

    def speedup(self, batch: int, k: int, acceptance: Sequence[float]) -> float:
        """Predicted tokens per second with k against those of plain decoding with the draft paused."""
        plain = self.seconds(batch, 0)
        return tokens_per_step(acceptance, k) * plain / self.seconds(batch, k, paused=False)

    def break_even(self, batch: int, k: int, paused: bool = True) -> float:
        """Acceptance length at which k drafted tokens give as many tokens per second as none, with the draft paused or not."""
        return self.seconds(batch, k, paused) / self.seconds(batch, 0, paused)


def _makes_sense(t: StepTiming) -> bool:
    return t.batch >= 1 and t.k >= 0 and t.steps >= 1 and math.isfinite(t.seconds) and t.seconds > 0


@dataclass(frozen=True)
class _Cell:
    """What was measured of one kind of step."""

    seconds: float
    steps: float
    context: float


def _together(seen: Sequence[_Cell]) -> _Cell:
    """What several phases measured: the median by steps, so that one phase on a busy machine says nothing; of two the mean."""
    steps = sum(cell.steps for cell in seen)
    context = sum(cell.context * cell.steps for cell in seen) / steps
    if len(seen) < 3:
        return _Cell(sum(cell.seconds * cell.steps for cell in seen) / steps, steps, context)
    passed, ordered = 0.0, sorted(seen, key=lambda cell: cell.seconds)
    for i, cell in enumerate(ordered):
        passed += cell.steps
        if passed > steps / 2:
            return _Cell(cell.seconds, steps, context)
        if passed == steps / 2:
            return _Cell((cell.seconds + ordered[i + 1].seconds) / 2, steps, context)
    raise AssertionError("no step was counted")


class _Fit:
    """A robust non-negative regression: monotone in tokens, linear in draft forwards; see the module's first lines."""

    def __init__(self, cells: Mapping[tuple[int, int, bool], _Cell], experts: Experts | None = None) -> None:
        self._experts = experts
        contexts = [cell.context for cell in cells.values()]
        # else it could not be told from what a request costs, whatever its length
        self._reads_context = max(contexts) > max(min(contexts) + _CONTEXTS, _CONTEXT_FACTOR * min(contexts))
        most = max(batch * (k + 1) for batch, k, _ in cells)
        # n tokens in one step never take longer than n steps of one, and a draft's forward pass no longer than the target's:
        # so timings that contradict each other cannot bring any step down to nothing
        self._least = min(cell.seconds / (batch * (2 * k + 1)) for (batch, k, _), cell in cells.items())
        self._knots = [2.0**i for i in range(math.ceil(math.log2(max(2, most))) + 1)]
        keys = list(cells)
        rows = np.array([self._features(*key, cells[key].context) for key in keys])
        seconds = np.array([cells[key].seconds for key in keys])
        weights = np.sqrt(np.minimum([cells[key].steps for key in keys], _MEMORY_STEPS)) / seconds
        smooth = self._smoothness(rows.shape[1]) * float(np.abs(weights * seconds).max()) / float(seconds.min())
        robust = np.ones(len(keys))
        for _ in range(6):  # iteratively reweighted least squares with Huber's weights
            w = weights * np.sqrt(robust)
            a = np.vstack([rows * w[:, None], smooth])
            self._x = non_negative_least_squares(a, np.concatenate([seconds * w, np.zeros(len(smooth))]))
            residual = np.abs(rows @ self._x - seconds) / seconds
            before, robust = robust, np.minimum(1.0, _HUBER / np.maximum(residual, 1e-12))
            if np.array_equal(robust, before):
                break  # the next solution would be the same

    def seconds(self, batch: int, k: int, paused: bool, context: float) -> float:
        return max(self._least, float(np.dot(self._features(batch, k, paused, context), self._x)))

    def _features(self, batch: int, k: int, paused: bool, context: float) -> list[float]:
        tokens = float(batch * (k + 1))
        ramps = [min(max(tokens - a, 0.0), b - a) for a, b in zip(self._knots, self._knots[1:], strict=False)]
        ramps[-1] += max(0.0, tokens - self._knots[-1])  # beyond all that was seen the last slope goes on
        first, more = float(not paused), float(max(0, k - 1))
        cached = batch * context if self._reads_context else 0.0
        read = [self._experts.touched(tokens, evenness) for evenness in _EVENNESS] if self._experts else []
        return [1.0, *ramps, first, first * tokens, more, more * batch, cached, *read]

    def _smoothness(self, width: int) -> np.ndarray:
        segments = len(self._knots) - 1
        rows = np.zeros((max(0, segments - 1), width))
        for i in range(segments - 1):
            rows[i, 1 + i], rows[i, 2 + i] = 1.0, -1.0
        return (_SMOOTH_OF_EXPERTS if self._experts else _SMOOTH) * rows


def non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |a x - b|, by the active sets of Bro and de Jong (J. Chemometrics 11, 1997: FNNLS)."""
    scale = np.sqrt((a * a).sum(0))
    scale[scale == 0] = 1.0
    gram, target = (a / scale).T @ (a / scale), (a / scale).T @ b
    x, free = np.zeros(len(target)), np.zeros(len(target), dtype=bool)
    blocked = free.copy()  # rounding alone says that they could rise
    tolerance = 1e-12 * max(1.0, float(np.abs(target).max(initial=0.0)))
    for _ in range(10 * len(target)):
        slope = np.where(free | blocked, -np.inf, target - gram @ x)
        new = int(np.argmax(slope))
        if not slope[new] > tolerance:
            break
        free[new] = True
        goal = _unbounded(gram, target, free)
        if goal[new] <= 0:
            free[new], blocked[new] = False, True
            continue
        while (free & (goal <= 0)).any():  # go as far as the first one that reaches zero, and leave it there
            way = np.where(free & (goal <= 0), x / np.maximum(x - goal, 1e-300), np.inf)
            x, first = np.maximum(0.0, x + way.min() * (goal - x)), int(np.argmin(way))
            free[first], x[first] = False, 0.0
            goal = _unbounded(gram, target, free)
        x, blocked[:] = goal, False
    solution: np.ndarray = x / scale
    return solution


def _unbounded(gram: np.ndarray, target: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The least squares solution in the free unknowns, the others zero."""
    x = np.zeros(len(target))
    x[free] = np.linalg.lstsq(gram[np.ix_(free, free)], target[free], rcond=None)[0]
    return x
