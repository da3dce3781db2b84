"""What two correct implementations of the policy differ by in this run, as its plain text shows, and what is beyond it.

Log-probs that an engine sampled and an actor recomputed with the same weights differ by rounding. Where a trainer is
asynchronous they may be one or more policy versions apart (the *lag*): the policy has moved in between, by how much differs from
step to step and has nothing to do with rounding, and plain and drafted text show it alike. So text with a lag is measured in
units of the plain text of its own batch. Only where a batch has none it is held against what plain text of that lag was in other
steps, with room for a step of another size; and where there is no such text either, against what no step does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spec_plugin.builtin.provenance.windows import Verdict, Windows, compared, judged, median
from spec_plugin.events import TargetInfo

#: chance that a batch of a correct run is refused, for each of the two statistics
ERROR_LEVEL = 1e-7
#: chance that a correct phase without drafts is not taken into the baseline: what is doubtful must not become the measure, and
#: to leave it out costs nothing
DOUBT_LEVEL = 1e-3
#: windows below which there is no evidence: of plain text, and of drafted text (they wait for those of the next batch)
ENOUGH = 16
#: phases with plain text that the run's own baseline reaches back, and windows that are kept of each
PHASES, KEPT = 16, 256
#: windows of the control group from which on it has a say, and versions that it may be old
CONTROL, _RECENT = 4, 16
#: those of one step that say how far its policy has moved: a measure that fewer sequences give by chance is a third of the truth
#: once in ten thousand batches, and a correct run is stopped then (``make guards``)
MEASURED = 8


@dataclass(frozen=True)
class Bounds:
    """For one statistic of a window, in nats: what is said of it where, and where not, the run has a baseline."""

    least: float  # never more than rounding
    most: float  # no correct run shows more, in most of its windows
    factor: float = 1.0  # of the baseline: honest differences between plain and verifying steps
    jump: float = 1.0  # of the baseline: no drift between two phases


#: By the coarser of the two dtypes, at temperature 1. Measured on real runs: float32 means of 5e-7 to 1e-4 (the largest token
#: 20 times as far off), bfloat16 means of 5e-3 to 2e-2 and single tokens beyond 1; published bfloat16 means up to 4e-2.
_MEANS = {
    "float32": Bounds(1e-5, 2e-3, 3.0, 10.0),
    "float16": Bounds(5e-4, 3e-2, 3.0, 10.0),
    "bfloat16": Bounds(3e-3, 0.1, 3.0, 10.0),
}
_MAXIMA = {
    "float32": Bounds(3e-4, 0.05, 10.0, 30.0),
    "float16": Bounds(1e-2, 1.0, 10.0, 30.0),
    "bfloat16": Bounds(0.1, 3.0, 10.0, 30.0),
}
#: Nats a window, in float32 at temperature 1, that no rounding of float32 explains (1e-4 was the most in real runs), and weights
#: that were rounded to bfloat16 do (2e-3 to 2e-2 of small models, for honest 2e-7 to 2e-6)
_COARSE = 3e-4
#: nats, so that nothing is divided by zero
_SMALLEST = 1e-12
_COARSENESS = ("float32", "float16", "bfloat16")
#: a single sequence is beyond anything at this multiple of ``most``, and of the largest plain window
_BEYOND, _BEYOND_PLAIN = 15.0, 30.0
#: Nats by which one update may move the policy, for each version in between, at temperature 1. Measured: 5e-4 in a quiet run,
#: 0.1 in one whose first steps were large (float32 both). ``least``: any update does; ``most``: none that learns something.
_MOVES = {"mean": Bounds(0.2, 1.0), "largest": Bounds(6.0, 30.0)}
_BEYOND_A_MOVE = 3.0  # and a single sequence


@dataclass(frozen=True)
class Phase:
    """Plain text of one phase."""

    version: int  # that recomputed it
    plain: Windows
    drafted: bool  # is it the control group's


Values = tuple[float, ...]


def _means(windows: Windows) -> Values:
    return windows.means


def _maxima(windows: Windows) -> Values:
    return windows.maxima


_STATISTICS = {"mean": _means, "largest": _maxima}


def _in_units(values: Values, of: Values) -> Values:
    unit = max(median(of), _SMALLEST)
    return tuple(value / unit for value in values)


@dataclass(frozen=True)
class Excess:
    """Too many windows are too far off."""

    what: str
    value: float  # nats
    bound: float


class Baseline:
    """What plain text has shown, by lag, and the tests that rest on it."""

    def __init__(self, target: TargetInfo) -> None:
        """Nothing is known yet.

        Args:
            target: its dtypes and its sampling temperature say what rounding can do.
        """
        coarser = max(target.dtype, target.actor_dtype, key=_COARSENESS.index)
        temperature = float(target.sampling.get("temperature", 1.0)) or 1.0
        self._scale = 1.0 / temperature  # differences of logits are divided by it
        self._exact = coarser == "float32"
        self._bounds = {"mean": _MEANS[coarser], "largest": _MAXIMA[coarser]}
        self._phases: dict[int, deque[Phase]] = defaultdict(lambda: deque(maxlen=PHASES))
        self._doubtful: dict[int, Phase] = {}  # by lag, the last one that was left out
        self.kind = [target.dtype, target.actor_dtype, f"{self._scale:.6g}"]  # what may be compared after a resume

    @property
    def far(self) -> float:
        """Nats from which on a single token is far off."""
        return self._bounds["largest"].most * self._scale

    @property
    def coarse(self) -> float | None:
        """What plain text shows, if everything is said to be float32 and it is coarser than that; else None."""
        means = self.past(0).means
        shown = median(means)
        return shown if self._exact and len(means) >= ENOUGH and shown > _COARSE * self._scale else None

    @property
    def tolerance(self) -> float:
        """Nats from which on the mean of a window counts against the run."""
        return self._same_policy((0.0,), self.past(0).means, self._bounds["mean"], self._bounds["mean"].factor).bound

    def past(self, lag: int) -> Windows:
        """All that is remembered of plain text so many versions old."""
        return sum((phase.plain for phase in self._phases.get(lag, ())), Windows())

    def remember(self, version: int, lag: int, plain: Windows, drafted: bool) -> Excess | None:
        """Plain text of a batch becomes part of what is known; unless its phase is doubtful, all of which is left out then.

        A phase without drafts that is further off than those before it must not become the measure of the next ones (law 3).

        Args:
            version: that recomputed it.
            lag: versions between sampling and that.
            plain: its windows.
            drafted: was it the control group's; what is to be thought of that, drafted text of the same phase has shown.

        Returns:
            In what this phase, as far as it is known now, is too far off; None where it is not, or was drafted.
        """
        doubtful = self._doubtful.get(lag)
        known = doubtful is not None and doubtful.version == version
        phases = self._phases[lag]
        before = doubtful if known else phases.pop() if phases and phases[-1].version == version else None
        whole = (before.plain if before is not None else Windows()) + plain
        if not whole:
            return None
        phase = Phase(version, Windows(whole.means[:KEPT], whole.maxima[:KEPT]), drafted)
        if known or (not drafted and self.too_far(whole, Windows(), lag, DOUBT_LEVEL) is not None):
            self._doubtful[lag] = phase
            return None if drafted else self.too_far(whole, Windows(), lag)
        phases.append(phase)
        return None

    def control(self, now: Windows, version: int, lag: int) -> Windows:
        """What the control group shows; where its requests are too few, with those of the phases before.

        With a lag those of this policy version only, of all its batches: how far the policy has moved differs from step to step.
        """
        for phase in reversed(self._phases[lag]):
            recent = phase.version == version if lag else len(now) < CONTROL and phase.version >= version - _RECENT
            if not recent:
                break
            now += phase.plain if phase.drafted else Windows()
        return now

    def too_far(self, found: Windows, control: Windows, lag: int, level: float = ERROR_LEVEL) -> Excess | None:
        """Are too many windows further off than plain text is, and than the control group.

        Args:
            found: these windows.
            control: what plain requests of the same phase show.
            lag: versions between sampling and recomputation.
            level: chance that this is said of a correct run.
        """
        for name, of in _STATISTICS.items():
            values, now = of(found), of(control)
            verdict = self._lagging(name, values, now, lag) if lag else self._agreeing(name, values, now, level)
            if verdict is not None and verdict.p_value <= level:
                what = f"the {name} difference in {verdict.above} of {verdict.of} stretches of text"
                return Excess(what, median(values), verdict.bound)
        return None

    def _agreeing(self, name: str, values: Values, now: Values, level: float) -> Verdict | None:
        """Sampled and recomputed by the same weights; None: plain requests of the same phase show it, too."""
        bounds, past = self._bounds[name], _STATISTICS[name](self.past(0))
        verdict = self._same_policy(values, past, bounds, bounds.factor)
        same = len(now) >= CONTROL and median(values) <= bounds.factor * median(now)
        drift = same and self._same_policy(values, past, bounds, bounds.jump).p_value > level
        return None if drift else verdict

    def _same_policy(self, values: Values, past: Values, bounds: Bounds, factor: float) -> Verdict:
        if len(past) < ENOUGH:
            return judged(values, bounds.most * self._scale)
        return compared(values, past, factor, bounds.least * self._scale)

    def _lagging(self, name: str, values: Values, now: Values, lag: int) -> Verdict | None:
        """The policy has really moved in between; None: plain text of the same batches shows the same."""
        bounds, move, scale = self._bounds[name], _MOVES[name], lag * self._scale
        of, phases = _STATISTICS[name], self._phases.get(lag, ())
        if len(now) >= MEASURED:
            # a step that has moved nothing (no learning rate yet) says nothing of how uneven a move is
            told = [of(p.plain) for p in phases if len(p.plain) >= MEASURED and median(of(p.plain)) > _SMALLEST]
            past = tuple(v for plain in told for v in _in_units(plain, plain))
            if len(past) >= ENOUGH:
                unit = max(median(now), _SMALLEST)
                verdict = compared(_in_units(values, now), past, bounds.factor, bounds.least * self._scale / unit)
                verdict = replace(verdict, bound=verdict.bound * unit)
            elif median(values) <= bounds.factor * median(now):
                return None
            else:  # no earlier step to learn from: against the plain text beside it, or against what no step does
                beside = compared(values, now, bounds.factor, bounds.least * self._scale)
                verdict = min(beside, judged(values, move.most * scale), key=lambda v: v.p_value)
        elif len(of(self.past(lag))) >= ENOUGH:
            verdict = compared(values, of(self.past(lag)), bounds.jump, move.least * scale)
        else:
            verdict = judged(values, move.most * scale)
        return verdict

    def beyond(self, lag: int, means: Sequence[float]) -> float:
        """Nats: no sequence of a correct run has such a mean.

        Args:
            lag: versions between sampling and recomputation.
            means: of the sequences of this batch; where the policy has moved, one is held against the others.
        """
        largest = max(self.past(lag).means, default=0.0)
        most = max(_BEYOND * self._bounds["mean"].most * self._scale, _BEYOND_PLAIN * largest)
        return most if lag == 0 else max(most, _BEYOND_A_MOVE * lag * self._scale, _BEYOND_PLAIN * median(means))

    def state(self) -> list[dict[str, Any]]:
        """For JSON: the phases, oldest first."""
        return [{"lag": lag, **asdict(phase)} for lag, phases in self._phases.items() for phase in phases]

    def restore(self, state: Iterator[Mapping[str, Any]] | list[Mapping[str, Any]]) -> None:
        """What ``state`` returned."""
        for p in state:
            plain = Windows(tuple(p["plain"]["means"]), tuple(p["plain"]["maxima"]))
            self._phases[int(p.get("lag", 0))].append(Phase(int(p["version"]), plain, bool(p["drafted"])))
