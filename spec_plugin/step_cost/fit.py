"""The cost model's surface: what is fitted to the measured kinds of steps, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spec_plugin.step_cost.experts import Experts

#: steps beyond which a measured cell weighs no more
MEMORY_STEPS = 64
_HUBER = 0.05  # relative residual from which an observation loses weight
_SMOOTH = 1e-3  # weight of "neighbouring segments have the same slope", where nothing was measured between them
_SMOOTH_OF_EXPERTS = 1.0  # the same where the bend has a form: else noise would be taken for one
#: tokens of the largest step over those at which the last segment begins, at least: its slope goes on beyond all that was seen,
#: and two steps that are nearly alike, and of different phases, say nothing of it
_LAST = 1.5
#: how unlike in the experts that they take the tokens of a step may be; what fits best is mixed of these
_EVENNESS = (1.0, 0.4)
#: tokens by which contexts must differ before anything is said of what they cost; and by which factor
_CONTEXTS, _CONTEXT_FACTOR = 64.0, 2.0


Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Kinds:
    """Steps of several kinds, [n] each; see ``CostModel.seconds``."""

    batch: Numbers
    k: Numbers
    paused: NDArray[np.bool_]
    context: Numbers  # NaN: as the rollouts have shown

    @classmethod
    def of(cls, batch: ArrayLike, k: Any, paused: Any = True, context: Any = math.nan) -> Kinds:
        """From batches, [n], or one, and what is one for all of them or [n]; what drafts is never paused."""
        batches = np.array(batch, np.float64, ndmin=1)
        nothing = np.zeros_like(batches)
        ks, contexts = k + nothing, context + nothing
        return cls(batches, ks, np.logical_and(paused, ks == 0), contexts)


class Fit:
    """A robust non-negative regression: monotone in tokens, linear in draft forwards; see ``model``."""

    def __init__(self, kinds: Kinds, seconds: Numbers, steps: Numbers, experts: Experts | None = None) -> None:
        """From what was measured of so many steps of these kinds: seconds of one, [n]."""
        self._experts = experts
        shortest, longest = float(kinds.context.min()), float(kinds.context.max())
        # else it could not be told from what a request costs, whatever its length
        self._reads_context = longest > max(shortest + _CONTEXTS, _CONTEXT_FACTOR * shortest)
        most = float((kinds.batch * (kinds.k + 1)).max()) / _LAST
        # n tokens in one step never take longer than n steps of one, and a draft's forward pass no longer than the target's:
        # so timings that contradict each other cannot bring any step down to nothing
        self._least = float((seconds / (kinds.batch * (2 * kinds.k + 1))).min())
        self._knots = 2.0 ** np.arange(math.ceil(math.log2(max(2.0, most))) + 1)
        rows = self._features(kinds)
        weights = np.sqrt(np.minimum(steps, MEMORY_STEPS)) / seconds
        smooth = self._smoothness(rows.shape[1]) * float(np.abs(weights * seconds).max()) / float(seconds.min())
        robust = np.ones(len(seconds))
        for _ in range(6):  # iteratively reweighted least squares with Huber's weights
            w = weights * np.sqrt(robust)
            a = np.vstack([rows * w[:, None], smooth])
            self._x = non_negative_least_squares(a, np.concatenate([seconds * w, np.zeros(len(smooth))]))
            residual = np.abs(rows @ self._x - seconds) / seconds
            before, robust = robust, np.minimum(1.0, _HUBER / np.maximum(residual, 1e-12))
            if np.array_equal(robust, before):
                break  # the next solution would be the same
        # the ramps together, at each knot
        self._heights = np.cumsum(self._x[: len(self._knots)] * np.append(1.0, np.diff(self._knots)))
        self._last_slope = self._x[len(self._knots) - 1]

    def seconds(self, kinds: Kinds) -> Numbers:
        """Of one step of each kind, [n]."""
        tokens = kinds.batch * (kinds.k + 1)
        ramps = np.interp(tokens, self._knots, self._heights)
        ramps += np.maximum(0.0, tokens - self._knots[-1]) * self._last_slope
        found: Numbers = np.maximum(self._least, ramps + self._beside(kinds, tokens) @ self._x[len(self._knots) :])
        return found

    def _features(self, kinds: Kinds) -> Numbers:
        tokens = kinds.batch * (kinds.k + 1)
        begin, end = (
            self._knots[:-1],
            np.append(self._knots[1:-1], np.inf),
        )  # the last slope goes on beyond all that was seen
        ramps = np.minimum(np.maximum(tokens[:, None] - begin, 0.0), end - begin)
        return np.column_stack([np.ones_like(tokens), ramps, self._beside(kinds, tokens)])

    def _beside(self, kinds: Kinds, tokens: Numbers) -> Numbers:
        """What a step takes beside the target's pass over so many tokens."""
        first, more = np.where(kinds.paused, 0.0, 1.0), np.maximum(0.0, kinds.k - 1.0)
        cached = kinds.batch * kinds.context if self._reads_context else np.zeros_like(tokens)
        read = [self._experts.touched(tokens, evenness) for evenness in _EVENNESS] if self._experts else []
        return np.stack([first, first * tokens, more, more * kinds.batch, cached, *read], axis=1)

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
