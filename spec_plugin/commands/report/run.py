"""One run as the report knows it: numbers by step under one set of names, and what they add up to. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median, quantiles

#: the plugin's own work that is logged by itself, in milliseconds
_WORK = {"draft training": "spec/train_ms", "refresh": "spec/refresh_ms", "harvest": "spec/harvest_ms"}


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @cached_property
    def _by_step(self) -> Mapping[int, float]:
        return dict(self.pairs())

    def pairs(self) -> Iterator[tuple[int, float]]:
        """(step, value), in order of the steps."""
        return zip(self.steps, self.values, strict=True)

    def at(self, step: int) -> float | None:
        """The value of a step, if it was logged."""
        return self._by_step.get(step)

    def before(self, step: int) -> float | None:
        """The last value that was logged before a step, None if there is none."""
        place = bisect_left(self.steps, step)
        return self.values[place - 1] if place else None

    def only(self, steps: Sequence[int]) -> Series:
        """The series without all other steps."""
        return Series.of({s: self._by_step[s] for s in steps if s in self._by_step})

    def fresh(self) -> Series:
        """Without values that are the one before to the last bit: what was not measured anew is logged again."""
        return self.only([s for i, s in enumerate(self.steps) if not i or self.values[i] != self.values[i - 1]])

    @classmethod
    def of(cls, values: Mapping[int, float]) -> Series:
        """From values by step, ascending."""
        return cls(tuple(values), tuple(values.values()))


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles; of fewer than three values there are none, and they are the extremes."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Median and quartiles; None if there are no values."""
        if not values:
            return None
        few = len(values) < 3
        low, _, high = (min(values), 0.0, max(values)) if few else quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high, len(values))

    def text(self, form: str = ".2f", unit: str = "") -> str:
        """For people: the median and, in brackets, the quartiles."""
        return f"{self.median:{form}}{unit} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True)
class LoggedRun:
    """One run's metrics by step, and what is missing of it."""

    name: str
    trainer: str  # empty if no adapter knows its metrics' names
    steps: Mapping[int, Mapping[str, float]]  # ``spec/…`` and the names of ``formats.Name``; finite numbers only
    remarks: tuple[str, ...] = ()  # what is missing or could not be read, as sentences
    sources: tuple[str, ...] = ()
    planned: int | None = None  # steps that the run was to have

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the logged steps, ascending."""
        return tuple(sorted(self.steps))

    @cached_property
    def every(self) -> int:
        """Of how many steps one was logged: 10 where a trainer logs the means of ten steps."""
        return spacing(self.numbers)

    @cached_property
    def _columns(self) -> Mapping[str, Series]:
        found: dict[str, dict[int, float]] = {}
        for step in self.numbers:
            for name, value in self.steps[step].items():
                found.setdefault(name, {})[step] = value
        return {name: Series.of(values) for name, values in found.items()}

    def series(self, name: str) -> Series:
        """One metric; empty if it was never logged."""
        return self._columns.get(name, Series())

    def family(self, stem: str) -> dict[int, Series]:
        """A family of metrics by its number, e.g. ``spec/k_b`` -> batch size -> k."""
        numbers = [name.removeprefix(stem) for name in self._columns if name.startswith(stem)]
        return {number: self.series(f"{stem}{number}") for number in sorted(int(n) for n in numbers if n.isdigit())}

    @property
    def has_plugin(self) -> bool:
        """Was any metric of the plugin logged, so that the flag was on."""
        return any(name.startswith("spec/") for name in self._columns)

    @property
    def reports_late(self) -> bool:
        """Is what is said of a rollout logged one step later, as where phases last from one weight sync to the next."""
        first = self.steps[self.numbers[0]]
        return "spec/on" in first and "spec/generation_s" not in first and bool(self.series("spec/generation_s"))

    @property
    def overlaps(self) -> bool:
        """Did generation go on while the policy was trained, as far as the metrics tell."""
        return any(v > 0 for name in ("spec/policy_lag", "staleness") for v in self.series(name).values)

    @cached_property
    def drafted(self) -> tuple[int, ...]:
        """Steps whose reported rollout was at least in part made with drafts."""
        lengths, first = self.series("spec/acceptance_length"), self.series("spec/acceptance_pos_0")
        return tuple(sorted({s for s, v in lengths.pairs() if v > 1.0} | {s for s, v in first.pairs() if v > 0.0}))

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Steps in which the draft's optimizer made a step; a slice of training without one, or logged again, is none."""
        made = self.series("spec/train_steps")
        return tuple(step for step in self.series("spec/train_ms").fresh().steps if made.at(step))

    @property
    def draft_loss(self) -> Series:
        """The draft's loss in the steps that trained it: of a slice without an optimizer step a 0 is logged."""
        return self.series("spec/draft_loss").only(self.trained)

    @property
    def expected(self) -> Series:
        """Acceptance length as predicted by training; 1 is also what is logged while nothing was measured."""
        known = self.series("spec/expected_acceptance")
        return known.only([s for s, v in known.pairs() if v > 1.0 or s in self.trained])


def spacing(numbers: Sequence[int]) -> int:
    """Of how many steps one was logged: the most frequent distance of neighbours of which all but the first are multiples.

    Returns:
        1 where there is no such distance.
    """
    apart = Counter(after - before for before, after in pairwise(numbers))
    fit = [size for size in apart if not any(number % size for number in numbers[1:])]
    return min(fit, key=lambda size: (-apart[size], size), default=1)


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


def earned_of(run: LoggedRun) -> Earned | None:
    """None where a run did not log it, or not how long its steps took; a step of which nothing is known has saved nothing."""
    cost, saved, took = (run.series(name) for name in ("spec/cost_so_far_s", "spec/saved_so_far_s", "step_s"))
    if not cost or not took:
        return None
    # each process counts from its own start: where the sum of costs falls, a run was resumed
    last = [s for i, s in enumerate(cost.steps) if i + 1 == len(cost.steps) or cost.values[i + 1] < cost.values[i]]
    saved_s, cost_s = (sum(series.at(step) or 0.0 for step in last) for series in (saved, cost))
    return Earned(saved_s, cost_s, sum(took.values) * run.every)


def work_of(run: LoggedRun) -> dict[str, Series]:
    """Seconds by step of draft training, refresh and harvest, as far as they were logged."""
    found = {}
    for name, metric in _WORK.items():
        spent = run.series(metric)
        done = spent if name == "harvest" else spent.fresh()  # the others' last time is logged again
        if spent:
            found[name] = Series(spent.steps, tuple((done.at(step) or 0.0) / 1e3 for step in spent.steps))
    return found


def duration(seconds: float) -> str:
    """For people: 3 h 12 min, 4 min 10 s, 7.3 s; of a loss with a minus."""
    if abs(seconds) < 59.95:
        return f"{seconds:.1f} s"
    size, large, small = (1, "min", "s") if round(abs(seconds)) < 3600 else (60, "h", "min")
    whole, rest = divmod(round(abs(seconds) / size), 60)
    return f"{'-' * (seconds < 0)}{whole} {large}" + f" {rest} {small}" * (rest > 0)
