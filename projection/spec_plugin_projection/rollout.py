"""Simulates a rollout phase request by request: how a batch drains, and how long the slowest engine takes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import StepCost

#: tokens up to which the steps of a response are drawn one by one; beyond, their number is as good as normal
_DRAWN = 128
#: engines that are simulated of each kind: those with the longest response, and those with the most tokens
_SLOWEST = 4


@dataclass(frozen=True)
class SimulatedPhase:
    """The duration of a simulated rollout phase, and at which batch sizes its tokens came."""

    seconds: float  # of the slowest engine
    load: dict[int, float] = field(
        default_factory=dict
    )  # batch size -> tokens generated at it, by the simulated engines

    @property
    def tail(self) -> float:
        """Share of the tokens that come from a batch of at most an eighth of the largest."""
        most = max(self.load, default=1)
        return sum(n for batch, n in self.load.items() if 8 * batch <= most) / max(sum(self.load.values()), 1e-9)


@dataclass(frozen=True)
class Workload:
    """The responses that one trainer step asks of all engines together."""

    lengths: np.ndarray  # [responses] tokens of each
    prompt: float  # tokens of each prompt
    group: int  # responses of one prompt, which its engine prefills once
    engines: int
    seats: int  # requests that one engine runs at once


def split(rollout: Workload, rng: np.random.Generator) -> list[np.ndarray]:
    """Which responses each engine gets: whole groups, as many to each, at random; the engines that can be the slowest."""
    groups = [rollout.lengths[i : i + rollout.group] for i in range(0, len(rollout.lengths), rollout.group)]
    shares = np.array_split(rng.permutation(len(groups)), min(rollout.engines, len(groups)))  # further engines idle
    engines = [np.concatenate([groups[i] for i in mine]) for mine in shares]
    slow = {
        *sorted(range(len(engines)), key=lambda i: -float(engines[i].max()))[:_SLOWEST],
        *sorted(range(len(engines)), key=lambda i: -float(engines[i].sum()))[:_SLOWEST],
    }
    return [engines[i] for i in sorted(slow)]


def simulate(
    rollout: Workload, cost: StepCost, chances: Sequence[float], table: Sequence[int] | int, rng: np.random.Generator
) -> SimulatedPhase:
    """Simulate the engines, each by itself, from the first request to the last.

    Args:
        rollout: the work.
        cost: seconds of a step.
        chances: of each drafted token, given those before it; see ``tokens_per_step``.
        table: k for each number of running requests, the last for all above; or one k.
        rng: for the distribution over engines, and for how many tokens are accepted.
    """
    ks = (table,) if isinstance(table, int) else tuple(table)
    load: dict[int, float] = {}
    engine = _Engine(rollout, cost, chances, ks, rng)
    return SimulatedPhase(max(engine.run(lengths, load) for lengths in split(rollout, rng)), load)


class _Engine:
    """One engine: all running requests advance by as many tokens in a step, and each ends when its own are done."""

    def __init__(
        self, rollout: Workload, cost: StepCost, chances: Sequence[float], ks: Sequence[int], rng: np.random.Generator
    ) -> None:
        self._rollout, self._cost, self._chances, self._ks, self._rng = rollout, cost, chances, ks, rng
        self._rates = {k: tokens_per_step(chances, k) for k in set(ks)}
        self._lines: dict[int, tuple[float, float]] = {}

    def run(self, lengths: np.ndarray, load: dict[int, float]) -> float:
        """Seconds until the last response is complete; adds to ``load`` what was generated at each batch size."""
        first = self._ks[min(len(lengths), self._rollout.seats, len(self._ks) - 1)]
        waiting: list[float] = effective_lengths(lengths - 1, self._chances, first, self._rng).tolist()[
            ::-1
        ]  # prefill makes the first token
        prompts = math.ceil(len(lengths) / self._rollout.group) * self._rollout.prompt
        clock = self._cost.seconds(max(1, round(prompts)), 0, context=0.0) if prompts else 0.0
        done, began = 0.0, 0.0  # tokens since the phase began; their sum over where running requests began
        running: list[tuple[float, float]] = []  # where each ends, where it began
        while waiting or running:
            while waiting and len(running) < self._rollout.seats:
                heapq.heappush(running, (done + waiting.pop(), done))
                began += done
            batch = len(running)
            until = running[0][0]
            context = self._rollout.prompt + (done + until) / 2 - began / batch
            k = self._ks[min(batch, len(self._ks) - 1)]
            clock += (until - done) / self._rates[k] * self._seconds(batch, k, context)
            load[batch] = load.get(batch, 0.0) + (until - done) * batch
            done = until
            while running and running[0][0] <= done:
                began -= heapq.heappop(running)[1]
        return clock

    def _seconds(self, batch: int, k: int, context: float) -> float:
        """A step's, which is linear in the context."""
        line = self._lines.get(batch)
        if line is None:
            paused = not any(self._ks)
            none, some = (self._cost.seconds(batch, k, paused and k == 0, context=c) for c in (0.0, 4096.0))
            line = self._lines[batch] = (none, (some - none) / 4096.0)
        return line[0] + line[1] * context


def effective_lengths(tokens: np.ndarray, chances: Sequence[float], k: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens that responses would have to be long if every step gave the mean: their steps x ``tokens_per_step``.

    The last step of a response may overshoot its end, and some are luckier than others: a renewal process (Feller II, XI.4:
    the mean overshoot is (E[X^2] / E[X] - 1) / 2 for whole tokens).

    Args:
        tokens: [responses] to generate in decoding steps.
        chances: see ``simulate``.
        k: drafted tokens.
        rng: for the acceptance.
    """
    if k == 0 or not len(tokens):
        return tokens
    emitted = emission_probabilities(chances, k)
    values = np.arange(1, k + 2)
    mean = float(emitted @ values)
    variance = float(emitted @ values**2) - mean**2
    overshoot = ((variance + mean**2) / mean - 1) / 2
    noise = rng.normal(0.0, np.sqrt(np.maximum(tokens, 0.0) * variance / mean))
    out = np.maximum(0.0, tokens + np.where(tokens > 0, overshoot + noise, 0.0))
    short = (tokens > 0) & (tokens <= _DRAWN)
    if short.any():
        emitted_by = rng.choice(values, size=(int(short.sum()), _DRAWN), p=emitted).cumsum(axis=1)
        out[short] = mean * (1 + (emitted_by < tokens[short][:, None]).sum(axis=1))
    return np.asarray(out)


def emission_probabilities(chances: Sequence[float], k: int) -> np.ndarray:
    """[k + 1] chance that a step emits 1, 2, … k + 1 tokens."""
    each = [chances[min(i, len(chances) - 1)] if chances else 0.0 for i in range(k)]
    reached = np.concatenate([[1.0], np.cumprod(each)])
    return np.asarray(reached - np.concatenate([reached[1:], [0.0]]))
