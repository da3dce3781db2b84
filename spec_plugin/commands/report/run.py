"""One run as the report knows it: numbers by step, under one set of names, and what the plugin said meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

#: the plugin's own work: its milliseconds, and are they logged again where nothing was done
_WORK = {
    "draft training": ("spec/train_ms", True),
    "refresh": ("spec/refresh_ms", True),
    "harvest": ("spec/harvest_ms", False),
}


@dataclass(frozen=True)
class Notice:
    """A line of the plugin's own in the console log: it is quoted, and nothing is concluded from its words."""

    step: int | None  # in which it was printed, as far as the log's step lines tell
    level: str  # INFO, WARNING, or ERROR for what stopped the run
    text: str


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

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

    def fresh(self) -> Series:
        """Without values that are the one before to the last bit: what was not measured anew is logged again."""
        return self.only([s for i, s in enumerate(self.steps) if not i or self.values[i] != self.values[i - 1]])

    def anew(self) -> Series:
        """With zeros in the place of values that only repeat the one before: nothing was done in those steps."""
        done = set(self.fresh().steps)
        return Series(self.steps, tuple(value if step in done else 0.0 for step, value in self.pairs()))

    def only(self, steps: Sequence[int]) -> Series:
        """The series without all other steps."""
        wanted = set(steps)
        kept = [(s, v) for s, v in self.pairs() if s in wanted]
        return Series(tuple(s for s, _ in kept), tuple(v for _, v in kept))

    def thinned(self, most: int) -> tuple[Series, Series, Series]:
        """At most so many values, each the median of neighbouring ones, with the smallest and the largest of these."""
        size = max(1, -(-len(self.steps) // most))
        groups = [self.values[i : i + size] for i in range(0, len(self.values), size)]
        steps = self.steps[size // 2 :: size]
        steps += self.steps[-1:] if len(steps) < len(groups) else ()  # a last group shorter than half of one
        middle, low, high = (Series(steps, tuple(map(of, groups))) for of in (median, min, max))
        return middle, low, high


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
        if len(values) < 3:
            return cls(median(values), min(values), max(values), len(values))
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high, len(values))

    def text(self, form: str = ".2f", unit: str = "") -> str:
        """For people: the median and, in brackets, the quartiles."""
        return f"{self.median:{form}}{unit} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True)
class LoggedRun:
    """One run's metrics by step, its own log lines, and what is missing."""

    name: str
    trainer: str  # empty if no adapter knows its metrics' names
    steps: Mapping[int, Mapping[str, float]]  # ``spec/…`` and the names of ``formats.Name``; finite numbers only
    notices: tuple[Notice, ...] = ()
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

    @property
    def extent(self) -> str:
        """For people: how many steps were logged."""
        each = f", one in {self.every}," if self.every > 1 else ""
        return f"{len(self.numbers)} logged steps{each}" if each else f"{len(self.numbers)} steps"

    @cached_property
    def _columns(self) -> Mapping[str, Series]:
        found: dict[str, tuple[list[int], list[float]]] = {}
        for step in self.numbers:
            for name, value in self.steps[step].items():
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        return {name: Series(tuple(steps), tuple(values)) for name, (steps, values) in found.items()}

    def series(self, name: str) -> Series:
        """One metric; empty if it was never logged."""
        return self._columns.get(name, Series((), ()))

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

    def as_json(self) -> dict[str, Any]:
        """JSON-ready values; docs/reference.md names the keys."""
        return {
            "name": self.name,
            "trainer": self.trainer or None,
            "plugin": self.has_plugin,
            "sources": list(self.sources),
            "planned_steps": self.planned,
            "remarks": list(self.remarks),
            "notices": [{"step": n.step, "level": n.level, "text": n.text} for n in self.notices],
            "steps": [{"step": step, **self.steps[step]} for step in self.numbers],
        }


@dataclass(frozen=True)
class Share:
    """The time that one part of the plugin's work takes."""

    name: str
    percent: Series  # of each step's time
    whole: float  # percent of all steps' time together


def spacing(numbers: Sequence[int]) -> int:
    """Of how many steps one was logged: the most frequent distance of neighbours of which all but the first are multiples.

    Args:
        numbers: of the logged steps, ascending.

    Returns:
        1 where there is no such distance.
    """
    apart = Counter(after - before for before, after in pairwise(numbers))
    fit = [size for size in apart if not any(number % size for number in numbers[1:])]
    return min(fit, key=lambda size: (-apart[size], size), default=1)


def shares_of(run: LoggedRun) -> list[Share]:
    """Of draft training, refresh and harvest; of those that were logged along with the step's time."""
    lengths, found = run.series("step_s"), []
    for name, (metric, repeats) in _WORK.items():
        spent = run.series(metric).anew() if repeats else run.series(metric)
        if pairs := [(step, ms / 10, length) for step, ms in spent.pairs() if (length := lengths.at(step))]:
            percent = Series(tuple(s for s, _, _ in pairs), tuple(took / length for _, took, length in pairs))
            found.append(Share(name, percent, sum(took for _, took, _ in pairs) / sum(all_ for _, _, all_ in pairs)))
    return found


def percent(value: float) -> str:
    """A share for people: 8.4 %, 0.3 %, 0.02 %."""
    if value >= 0.95:
        return f"{value:.1f} %"
    return f"{value:.1g} %" if value >= 0.01 else "under 0.01 %"
