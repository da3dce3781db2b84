"""The cost model's surface: what is fitted to the measured kinds of steps, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spec_plugin.step_cost.experts import Experts

#: steps beyond which a measured cell weighs no more
MEMORY_STEPS = 64
_HUBER = 0.05  # relative residual from which an observation loses weight
_SMOOTH = 1e-3  # weight of "neighbouring segments have the same slope", where nothing was measured between them
_SMOOTH_OF_EXPERTS = 1.0  # the same where the bend has a form: else noise would be taken for one
#: how unlike in the experts that they take the tokens of a step may be; what fits best is mixed of these
_EVENNESS = (1.0, 0.4)
#: tokens by which contexts must differ before anything is said of what they cost; and by which factor
_CONTEXTS, _CONTEXT_FACTOR = 64.0, 2.0


@dataclass(frozen=True)
class Cell:
    """What was measured of one kind of step."""

    seconds: float
    steps: float
    context: float


class Fit:
    """A robust non-negative regression: monotone in tokens, linear in draft forwards; see ``model``."""

    def __init__(self, cells: Mapping[tuple[int, int, bool], Cell], experts: Experts | None = None) -> None:
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
        weights = np.sqrt(np.minimum([cells[key].steps for key in keys], MEMORY_STEPS)) / seconds
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
        """Of a step; arguments as for ``CostModel.seconds``."""
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
