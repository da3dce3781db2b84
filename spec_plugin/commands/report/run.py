"""One run as the report knows it: numbers by step under one set of names, and what they add up to. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

#: values of one metric by step, in the order of the steps; steps that did not log it are missing
Series = dict[int, float]
#: what runs are set side by side by: a metric, what it is called, and its unit
SIDE_BY_SIDE = {
    "ms_per_token": ("generation, per token", "ms"),
    "generation_s": ("generation that the trainer waits for", "seconds"),
    "step_s": ("whole step", "seconds"),
    "spec/acceptance_length": ("acceptance length", "tokens per forward pass"),
    "spec/speedup_realised": ("decoding speed-up, realised", "x plain decoding"),
    "reward": ("reward", "mean"),
}
#: the plugin's own work that is logged by itself, in milliseconds
_WORK = {"draft training": "spec/train_ms", "refresh": "spec/refresh_ms", "harvest": "spec/harvest_ms"}


def before(series: Series, step: int) -> float | None:
    """The last value that was logged before a step, None if there is none."""
    place = bisect_left(steps := list(series), step)
    return series[steps[place - 1]] if place else None


def only(series: Series, steps: Iterable[int]) -> Series:
    """The series without all other steps."""
    kept = set(steps)
    return {step: value for step, value in series.items() if step in kept}


def fresh(series: Series) -> Series:
    """Without values that are the one before to the last bit: what was not measured anew is logged again."""
    previous = [None, *series.values()]
    return {step: value for (step, value), last in zip(series.items(), previous, strict=False) if value != last}


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Median and quartiles, between values by linear interpolation; None if there are no values."""
        if not (known := list(values)):
            return None
        low, middle, high = np.percentile(known, (25, 50, 75)).tolist()
        return cls(middle, low, high, len(known))

    def text(self, unit: str = "") -> str:
        """For people: the median and, in brackets, the quartiles."""
        return f"{self.median:.2f}{unit} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Earned:
    """Seconds of all steps together; see ``spec_plugin.lifecycle.ledger`` for how they are estimated."""

    saved_s: float  # generation that the trainer did not wait for
    cost_s: float  # draft training, harvest, refreshes, self-tests
    run_s: float  # what the steps took; in verl the first self-test is not in it

    @property
    def net_s(self) -> float:
        """Earned less spent."""
        return self.saved_s - self.cost_s

    @property
    def sentence(self) -> str:
        """For a headline: of the time that the run would have taken without the flag, or of what it took where that was less."""
        parts = f"{duration(self.saved_s)} of generation, for {duration(self.cost_s)} of work for it"
        if self.net_s >= 0.0:
            return f"saved {duration(self.net_s)} of {duration(self.run_s + self.net_s)} ({parts})"
        return f"cost {duration(-self.net_s)} of {duration(self.run_s)} (saved {parts})"


@dataclass(frozen=True)
class LoggedRun:
    """One run's metrics by step, and what is missing of it."""

    name: str
    trainer: str  # empty if no adapter knows its metrics' names
    steps: Mapping[int, Mapping[str, float]]  # ``spec/…`` and the names of ``formats.Name``; finite numbers only
    remarks: tuple[str, ...] = ()  # what is missing or could not be read, as sentences
    sources: tuple[str, ...] = ()

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the logged steps, ascending."""
        return tuple(sorted(self.steps))

    @cached_property
    def every(self) -> int:
        """Of how many steps one was logged: 10 where a trainer logs the means of ten steps, and perhaps the first, too."""
        later = self.numbers[1:] if self.numbers[:1] == (1,) else self.numbers
        return math.gcd(*later) if len(later) > 1 else 1

    @cached_property
    def _columns(self) -> Mapping[str, Series]:
        found: dict[str, Series] = {}
        for step in self.numbers:
            for name, value in self.steps[step].items():
                found.setdefault(name, {})[step] = value
        return found

    def series(self, name: str) -> Series:
        """One metric; empty if it was never logged."""
        return self._columns.get(name, {})

    def family(self, stem: str) -> dict[int, Series]:
        """A family of metrics by its number, e.g. ``spec/k_b`` -> batch size -> k."""
        numbers = [name.removeprefix(stem) for name in self._columns if name.startswith(stem)]
        return {number: self.series(f"{stem}{number}") for number in sorted(int(n) for n in numbers if n.isdigit())}

    @property
    def has_plugin(self) -> bool:
        """Was any metric of the plugin logged, so that the flag was on."""
        return any(name.startswith("spec/") for name in self._columns)

    @property
    def overlaps(self) -> bool:
        """Did generation go on while the policy was trained, as far as the metrics tell."""
        return any(v > 0 for name in ("spec/policy_lag", "staleness") for v in self.series(name).values())

    @cached_property
    def drafted(self) -> tuple[int, ...]:
        """Steps whose reported rollout was at least in part made with drafts."""
        return tuple(step for step, length in self.series("spec/acceptance_length").items() if length > 1.0)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Steps in which the draft's optimizer made a step; a slice of training without one, or logged again, is none."""
        made = self.series("spec/train_steps")
        return tuple(step for step in fresh(self.series("spec/train_ms")) if made.get(step))

    @property
    def draft_loss(self) -> Series:
        """The draft's loss in the steps that trained it: of a slice without an optimizer step a 0 is logged."""
        return only(self.series("spec/draft_loss"), self.trained)

    @cached_property
    def expected(self) -> Series:
        """Acceptance length as predicted by training; 1 is also what is logged while nothing was measured."""
        known, trained = self.series("spec/expected_acceptance"), set(self.trained)
        return {step: value for step, value in known.items() if value > 1.0 or step in trained}

    @cached_property
    def sums_so_far(self) -> tuple[Series, Series]:
        """Seconds that all steps up to each one have saved, and that they have cost; of what is not known nothing was saved.

        Each process counts from its own start: where a run was resumed, what was counted until then is added to what follows.
        """
        saved, cost = dict[int, float](), dict[int, float]()
        logged, earlier, last = self.series("spec/saved_so_far_s"), (0.0, 0.0), (0.0, 0.0)
        for step, spent in self.series("spec/cost_so_far_s").items():
            if step in self.resumed:
                earlier = (earlier[0] + last[0], earlier[1] + last[1])
            last = (logged.get(step, 0.0), spent)
            saved[step], cost[step] = earlier[0] + last[0], earlier[1] + last[1]
        return saved, cost

    @cached_property
    def resumed(self) -> tuple[int, ...]:
        """Steps at which the sum of costs had fallen: another process had begun to count."""
        logged = [*self.series("spec/cost_so_far_s").items()]
        return tuple(step for (_, before), (step, cost) in pairwise(logged) if cost < before)

    @cached_property
    def self_tests(self) -> Series:
        """Seconds of the steps in which the engines were tested: what these cost beside the work that is logged by itself.

        Nothing else takes so long at once: it is told from other work by ten times that of a usual step, and a second.
        """
        cost, sums = self.sums_so_far[1], [0.0, *self.sums_so_far[1].values()]
        work = {step: self.every * sum(spent.get(step, 0.0) for spent in self.work.values()) for step in cost}
        rest = {step: spent - last - work[step] for (step, spent), last in zip(cost.items(), sums, strict=False)}
        usual = float(np.median([*rest.values()])) if rest else 0.0
        return {step: seconds for step, seconds in rest.items() if seconds > max(1.0, 10 * usual)}

    @property
    def earned(self) -> Earned | None:
        """None where it was not logged, or not how long the steps took."""
        (saved, cost), took = self.sums_so_far, self.series("step_s")
        if not cost or not took:
            return None
        return Earned([*saved.values()][-1], [*cost.values()][-1], sum(took.values()) * self.every)

    @cached_property
    def work(self) -> Mapping[str, Series]:
        """Seconds by step of draft training, refresh and harvest; a time that is logged again was not spent again."""
        logged = {name: self.series(metric) for name, metric in _WORK.items()}
        return {
            name: dict.fromkeys(spent, 0.0) | {step: ms / 1e3 for step, ms in fresh(spent).items()}
            for name, spent in logged.items()
            if spent
        }


def duration(seconds: float) -> str:
    """For people: 3 h 12 min, 4 min 10 s, 7.3 s; of a loss with a minus."""
    if abs(seconds) < 59.95:
        return f"{seconds:.1f} s"
    size, large, small = (1, "min", "s") if round(abs(seconds)) < 3600 else (60, "h", "min")
    whole, rest = divmod(round(abs(seconds) / size), 60)
    return f"{'-' * (seconds < 0)}{whole} {large}" + f" {rest} {small}" * (rest > 0)
