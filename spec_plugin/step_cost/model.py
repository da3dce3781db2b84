"""The cost model of law 7: seconds of a decoding step by batch size and k, learned from the engine's own steps.

A decoding step with b requests and k drafted tokens each runs one target forward over b * (k + 1) tokens and k draft
forwards over b tokens. The model is their sum: a target part that never falls with the number of tokens, a part that is
linear in the tokens of the KV cache, which attention reads once whatever k is, and a draft part that is linear in k and b.
In a mixture the target's part also follows the experts that the tokens touch: steep where a calibration has few batch sizes,
flat from some dozens of tokens on. On simulated steps of four mixtures (``tests/unit/step_cost/test_cost_of_experts.py``; each
measurement 3 % off) 11 of 3360 choices of k are then below 0.97 of plain, where 37 were.
The start-up calibration knows short contexts only, and responses grow: what was measured at one context is carried over to
the rollouts' by that second part. With the acceptance of each drafted position it predicts tokens per second, hence the speed-up
for each k and the break-even. All functions are pure; the engine is nowhere near.

What was measured is kept by bands of batch sizes (``bands``), of each the latest phases, at the mean batch that they had: so what
is kept, and the time that it takes, do not grow with the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from spec_plugin.events import StepTiming
from spec_plugin.step_cost.bands import Seen, band_of, bands_of, mean, middle, together
from spec_plugin.step_cost.experts import Experts
from spec_plugin.step_cost.fit import MEMORY_STEPS, Fit, Kinds, Numbers

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
#: more than twice any k: numbers of kinds of steps within a band
_KINDS = 1 << 16

Key = tuple[int, int, bool]  # band, k, paused


class StepCost(Protocol):
    """Seconds of decoding steps, whether they were measured (``CostModel``) or are projected (``projection.Roofline``)."""

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """Seconds of one step with ``batch`` requests; arguments as for ``CostModel.seconds``."""
        ...

    def seconds_of(self, kinds: Kinds) -> Numbers:
        """The same of one step of each kind, [n]."""
        columns = (kinds.batch, kinds.k.astype(int), kinds.paused, kinds.context)
        steps = zip(*(column.tolist() for column in columns), strict=True)
        return np.array([self.seconds(b, k, p, None if math.isnan(c) else c) for b, k, p, c in steps], np.float64)


class Corrected(StepCost):
    """A cost model whose drafted steps take ``factor`` times as long."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost, self._factor = cost, factor

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """See ``StepCost``."""
        return self._cost.seconds(batch, k, paused, context) * (self._factor if k else 1.0)

    def seconds_of(self, kinds: Kinds) -> Numbers:
        """See ``StepCost``."""
        found: Numbers = self._cost.seconds_of(kinds) * np.where(kinds.k > 0, self._factor, 1.0)
        return found


class CostModel:
    """Seconds of a decoding step by batch size and k; ``observe`` what the engine measured, then ask."""

    def __init__(self, experts: Experts | None = None) -> None:
        """Nothing is known yet.

        Args:
            experts: of the target, where it has some; see the module's first lines.
        """
        self.experts = experts
        self._seen: dict[Key, list[Seen]] = {}  # the latest phases, oldest first
        self._cells: dict[Key, Seen] = {}
        self._contexts: dict[int, float] = {}  # of the rollouts, by band
        self._calibrated = 0.0  # tokens of the longest context that was calibrated
        self._surface: _Surface | None = None
        #: why the model must not be believed yet; None when it may be
        self.problem: str | None = self._missing()

    def observe(self, timings: Sequence[StepTiming], calibration: bool = False) -> None:
        """Learn from steps of the engine; what makes no sense (not finite, not positive) is left out.

        Args:
            timings: the engine's step log.
            calibration: these steps are no rollout's, and say nothing of how long contexts are there.
        """
        # a paused draft drafts nothing, whatever a calibration's file says
        known = [replace(t, paused=False) if t.paused and t.k else t for t in timings if _makes_sense(t)]
        before = dict(self._cells)
        for t in together(known):
            key = (band_of(t.batch), t.k, t.paused)
            seen = self._seen.setdefault(key, [])
            seen.append(Seen(t.seconds, t.batch, t.context, t.steps))
            while len(seen) > _MEMORY_PHASES and sum(s.steps for s in seen[1:]) >= MEMORY_STEPS:
                del seen[0]
            self._cells[key] = _of_phases(seen)
            self._calibrated = max(self._calibrated, t.context * calibration)
            if t.context > 0 and not calibration:
                held = self._contexts.get(key[0], t.context)
                self._contexts[key[0]] = _NEWEST * t.context + (1 - _NEWEST) * held
        if self._cells != before:
            self._surface = None
        self.problem = self._missing() or self._without_contradictions()

    def at_usual_speed(self, timings: Sequence[StepTiming]) -> tuple[StepTiming, ...]:
        """Steps of one rollout as they would have been, had the machine been as fast as it usually is.

        A shared machine is faster or slower from one rollout to the next, and plain steps and drafted ones come from different
        rollouts. So only what a rollout says of some kinds of steps *against others* is news; the very first one's is taken as
        it is where contexts are much longer than in the calibration. Plain steps against drafted ones: ``judge``.
        """
        known = [t for t in timings if _makes_sense(t)]
        longest = max((t.context for t in known), default=0.0)
        alike = bool(self._contexts) or 0.0 < longest <= _LONGER * self._calibrated
        if not known or not alike or self.problem is not None:
            return tuple(timings)
        batch, k, paused, context = zip(*((t.batch, t.k, t.paused, t.context or math.nan) for t in known), strict=True)
        usually = self.seconds_of(Kinds.of(batch, k, paused, context))
        slow = sorted((t.seconds / said, t.seconds * t.steps) for t, said in zip(known, usually.tolist(), strict=True))
        half, passed, usual = sum(weight for _, weight in slow) / 2, 0.0, 1.0
        for factor, weight in slow:
            passed, usual = passed + weight, factor
            if passed >= half:
                break
        return tuple(replace(t, seconds=t.seconds / usual) for t in timings)

    def _missing(self) -> str | None:
        """What was not timed at all."""
        if all(k for _, k, _ in self._cells):
            return "no plain step was timed"
        return None if any(k for _, k, _ in self._cells) else "no speculating step was timed"

    def _without_contradictions(self) -> str | None:
        """Leave out the batch sizes at which the timings contradict themselves, as long as others are left to go by; else say so.

        Something else had the machine then. Where the rollouts do not come to such a size, nothing would ever set it right.
        """
        kinds: dict[int, set[bool]] = {}
        for band, k, _ in self._cells:
            kinds.setdefault(band, set()).add(k > 0)
        while (found := self._implausible()) is not None:
            band, k, ratio = found
            if not any(len(seen) == 2 for other, seen in kinds.items() if other != band):
                return (
                    f"a step with k={k} at batch size {band} seems to take {ratio:.3g} of the time of a plain one: "
                    "the timings contradict each other"
                )
            del kinds[band]
            for key in [key for key in self._cells if key[0] == band]:
                del self._cells[key], self._seen[key]
            self._surface = None
            if (missing := self._missing()) is not None:
                return missing
        return None

    def _implausible(self) -> tuple[int, int, float] | None:
        """Band, k and share of a plain step, of the first speculating one that cannot be so fast."""
        drafted = [(key, cell) for key, cell in self._cells.items() if key[1] > 0]
        batch, context = [cell.batch for _, cell in drafted], [cell.context for _, cell in drafted]
        plain = self.seconds_of(Kinds.of(batch, 0, True, context))
        for (key, cell), seconds in zip(drafted, plain.tolist(), strict=True):
            if not cell.seconds / seconds > _IMPLAUSIBLE:
                return key[0], key[1], cell.seconds / seconds
        return None

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """Predicted seconds of one step: the fitted surface, corrected by what was measured in this very band.

        Args:
            batch: requests in the step.
            k: drafted tokens of each.
            paused: with k = 0, is the draft's forward pass left out. k > 0 never pauses.
            context: tokens that each request has in the KV cache; None: as the rollouts have shown.

        Raises:
            RuntimeError: if nothing was observed.
        """
        return float(self.seconds_of(Kinds.of(batch, k, paused, math.nan if context is None else context))[0])

    def seconds_of(self, kinds: Kinds) -> Numbers:
        """The same of one step of each kind, [n]."""
        if self._surface is None:
            if not self._cells:
                raise RuntimeError("the cost model has seen no step yet")
            self._surface = _Surface(self._cells, self._contexts, self.experts)
        return self._surface.seconds(kinds)

    def context(self, batch: float) -> float:
        """Tokens that a request has in the KV cache when so many run, as far as the rollouts have shown."""
        return float(_Contexts(self._contexts, self._cells).of(np.array([batch], np.float64))[0])

    def break_even(self, batch: float, k: int, paused: bool = True) -> float:
        """Acceptance length at which k drafted tokens give as many tokens per second as none, with the draft paused or not."""
        return self.seconds(batch, k, paused) / self.seconds(batch, 0, paused)


def positive(seconds: float) -> bool:
    """Are so many seconds a time that something may take."""
    return math.isfinite(seconds) and seconds > 0.0


def _makes_sense(t: StepTiming) -> bool:
    return t.batch >= 1 and t.k >= 0 and t.steps >= 1 and positive(t.seconds)


def _of_phases(seen: Sequence[Seen]) -> Seen:
    """What several phases measured: one on a busy machine says nothing of seconds, and as much as others of contexts."""
    of_all = mean(seen)
    return of_all if len(seen) < 3 else middle(seen)._replace(context=of_all.context)


class _Contexts:
    """Tokens that a request has in the KV cache, by batch size."""

    def __init__(self, rollouts: Mapping[int, float], cells: Mapping[Key, Seen]) -> None:
        """Of the rollouts, by band; where these have shown none yet, of all cells."""
        of_all = mean(cells.values()).context if cells else 0.0
        known = sorted(rollouts.items()) or [(1, of_all)]
        places = np.log([band for band, _ in known])
        self._until, self._held = (places[1:] + places[:-1]) / 2, np.array([held for _, held in known])

    def of(self, batch: Numbers) -> Numbers:
        """Of the band that is nearest to each batch size, [n]."""
        found: Numbers = self._held[np.searchsorted(self._until, np.log(batch))]
        return found


class _Surface:
    """What the cells say of any step."""

    def __init__(self, cells: Mapping[Key, Seen], contexts: Mapping[int, float], experts: Experts | None) -> None:
        measured = sorted((_number(*key), cell.batch, key[1], key[2], *cell) for key, cell in cells.items())
        numbers, batch, k, paused, seconds, _, context, steps = (
            np.array(column) for column in zip(*measured, strict=True)
        )
        kinds = Kinds.of(batch, k, paused, context)
        self._fit = Fit(kinds, seconds, steps, experts)
        self._contexts = _Contexts(contexts, cells)
        self._numbers = numbers
        # a cell counts against the surface by its steps
        self._off = (seconds / self._fit.seconds(kinds) - 1.0) * steps / (steps + _PRIOR_STEPS)

    def seconds(self, kinds: Kinds) -> Numbers:
        """Of one step of each kind, [n]."""
        if np.isnan(kinds.context).any():
            held = np.where(np.isnan(kinds.context), self._contexts.of(kinds.batch), kinds.context)
            kinds = replace(kinds, context=held)
        numbers = _number(bands_of(kinds.batch), kinds.k.astype(np.int64), kinds.paused)
        places = np.searchsorted(self._numbers, numbers).clip(max=len(self._numbers) - 1)
        off = np.where(self._numbers[places] == numbers, self._off[places], 0.0)
        found: Numbers = self._fit.seconds(kinds) * (1.0 + off)
        return found


def _number(band: Any, k: Any, paused: Any) -> Any:
    """One number for each kind of step, or an array of them."""
    return band * _KINDS + 2 * k + paused
