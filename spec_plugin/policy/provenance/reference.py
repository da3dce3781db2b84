"""What two correct implementations of the policy differ by in this run, as its plain text shows, and what is beyond it.

Sampled and recomputed by the same weights, log-probs differ by rounding. With a *lag*, policy versions in between, the policy has
moved: by how much differs from step to step, and plain and drafted text of one step show it alike. So text with a lag is measured
in units of the plain text of its own step where that has any, and else with room for a step of another size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from spec_plugin.policy.provenance import rules
from spec_plugin.policy.provenance.exceedance import exceedance_test, share_test
from spec_plugin.policy.provenance.rules import Precision, Statistic, ToleranceRule
from spec_plugin.policy.provenance.windows import Windows, median

#: windows that are kept of a phase
KEPT = 256

Values = tuple[float, ...]  # one of each window


@dataclass(frozen=True)
class Refusal:
    """Which statistic of a text is beyond which bound, both in nats."""

    what: str
    value: float  # nats
    bound: float  # nats
    sequences: tuple[int, ...] = ()  # rows that it is about; (): any token beyond the bound

    def where(self, diff: Tensor, mask: Tensor) -> Tensor:
        """[B, T] bool: the tokens to be shown, of differences and a mask [B, T]."""
        if not self.sequences:
            return mask & (diff > self.bound)
        rows = torch.zeros_like(mask)
        rows[list(self.sequences)] = True
        return mask & rows


@dataclass(frozen=True)
class PlainPhase:
    """Differences in windows of a phase's plain text, and whether other text of the phase was drafted."""

    version: int  # that recomputed it
    plain: Windows
    drafted: bool  # is it the control group's


class Reference:
    """What plain text of the last phases differs by, and the only judge of other text: ``rules`` say how.

    Args:
        lag: of all text that it is for, in policy versions.
        precision: of the run.
    """

    def __init__(self, lag: int, precision: Precision) -> None:
        self._lag, self._precision = lag, precision
        self._phases: deque[PlainPhase] = deque(maxlen=rules.PHASES)
        self._doubtful: PlainPhase | None = None  # the last one that was left out
        self._unjudged = (0, Windows())  # drafted text, too little to be judged, and the version that recomputed it

    @property
    def plain(self) -> Windows:
        """Windows of all phases that are kept, oldest first."""
        return sum((phase.plain for phase in self._phases), Windows())

    @property
    def tolerance(self) -> float:
        """Nats from which on the mean of a window counts against the run, lag 0."""
        ((rule, plain),) = self._in_force("mean", (0.0,), ())
        return self._test("mean", (0.0,), rule, plain)[1]

    @property
    def coarse(self) -> float | None:
        """What plain text shows, if everything is said to be float32 and it is coarser than that; else None."""
        means = self.plain.means
        coarse = median(means) > rules.COARSE_FLOAT32 * self._precision.scale
        return median(means) if self._precision.dtype == "float32" and len(means) >= rules.ENOUGH and coarse else None

    def judge_sequences(self, means: Mapping[int, float]) -> Refusal | None:
        """Is one sequence beyond anything that a correct run shows.

        Args:
            means: nats, by row, of long sequences; where the policy has moved, one is held against the others.
        """
        plausible = rules.SEQUENCE_PLAUSIBLE * rules.MAX_PLAUSIBLE.of("mean", self._precision, 0)
        move = rules.SEQUENCE_MOVE * self._lag * self._precision.scale
        usual = max((*self.plain.means, median(list(means.values())) if self._lag else 0.0))
        bound = max(plausible, move, rules.SEQUENCE_FACTOR * usual)
        beyond = {row: mean for row, mean in means.items() if mean > bound}
        if not beyond:
            return None
        return Refusal("the mean difference of a sequence", max(beyond.values()), bound, tuple(beyond))

    def judge(self, drafted: Windows, control: Windows, version: int) -> Refusal | None:
        """Are too many windows of drafted text further off than plain text is; too few of them wait for those of the next batch.

        Args:
            drafted: windows of a batch.
            control: what plain requests of the same phase show, see ``control``.
            version: that recomputed both.
        """
        before, waiting = self._unjudged
        if self._lag and before != version:  # the policy has moved by another step since
            waiting = Windows()
        waiting += drafted
        enough = len(waiting) >= rules.ENOUGH
        self._unjudged = (version, Windows() if enough else waiting)
        return self._too_far(waiting, control, rules.ERROR_LEVEL) if enough else None

    def learn(self, plain: Windows, version: int, drafted: bool) -> Refusal | None:
        """Plain text of a batch becomes part of the reference; unless its phase is doubtful, all of which is left out then.

        A phase without drafts that is further off than those before it must not become the measure of the next ones (law 3).

        Args:
            plain: its windows.
            version: that recomputed it.
            drafted: was it the control group's; what is to be thought of that, drafted text of the same phase has shown.

        Returns:
            In what this phase, as far as it is known now, is too far off; None where it is not, or was drafted.
        """
        doubtful, phases = self._doubtful, self._phases
        known = doubtful is not None and doubtful.version == version
        before = doubtful if known else phases.pop() if phases and phases[-1].version == version else None
        whole = (before.plain if before is not None else Windows()) + plain
        if not whole:
            return None
        phase = PlainPhase(version, Windows(whole.means[:KEPT], whole.maxima[:KEPT]), drafted)
        if known or (not drafted and self._too_far(whole, Windows(), rules.DOUBT_LEVEL) is not None):
            self._doubtful = phase
            return None if drafted else self._too_far(whole, Windows(), rules.ERROR_LEVEL)
        phases.append(phase)
        return None

    def control(self, now: Windows, version: int) -> Windows:
        """What the control group shows; where its requests are too few, with those of the phases before.

        With a lag those of this policy version only, of all its batches: how far the policy has moved differs from step to step.
        """
        for phase in reversed(self._phases):
            few = len(now) < rules.CONTROL and phase.version >= version - rules.CONTROL_AGE
            if not (phase.version == version if self._lag else few):
                break
            now += phase.plain if phase.drafted else Windows()
        return now

    def _too_far(self, found: Windows, control: Windows, level: float) -> Refusal | None:
        for statistic in rules.STATISTICS:
            values = found.of(statistic)
            in_force = self._in_force(statistic, values, control.of(statistic))
            tests = [self._test(statistic, values, rule, plain) for rule, plain in in_force]
            p_value, bound = min(tests, key=itemgetter(0), default=(1.0, 0.0))
            if p_value <= level:
                beyond = sum(value > bound for value in values)
                what = f"the {statistic} difference in {beyond} of {len(values)} stretches of text"
                return Refusal(what, median(values), bound)
        return None

    def _test(self, statistic: Statistic, values: Values, rule: ToleranceRule, plain: Values) -> tuple[float, float]:
        floor = rule.floor.of(statistic, self._precision, self._lag)
        if rule.factor is None:
            return share_test(values, floor)
        return exceedance_test(values, plain, rule.factor[statistic], floor)

    def _in_force(self, statistic: Statistic, values: Values, control: Values) -> list[tuple[ToleranceRule, Values]]:
        """The rows of the table that hold for these windows, each with its plain windows; none: there is nothing to refuse."""
        known = self.plain.of(statistic)
        as_far = len(control) >= rules.CONTROL and median(values) <= rules.DRAFTED_FACTOR[statistic] * median(control)
        if not self._lag:
            if len(known) < rules.ENOUGH:
                return [(rules.FIRST_TEXT, ())]
            return [(rules.DRIFTED if as_far else rules.SAME_POLICY, known)]
        if len(control) >= rules.MEASURED:
            steps = self._measured_steps(statistic, median(control))
            if len(steps) >= rules.ENOUGH:
                return [(rules.MEASURED_STEP, steps)]
            return [] if as_far else [(rules.FIRST_STEP, control), (rules.FIRST_LAG, ())]
        return [(rules.OTHER_STEPS, known)] if len(known) >= rules.ENOUGH else [(rules.FIRST_LAG, ())]

    def _measured_steps(self, statistic: Statistic, median_now: float) -> Values:
        """Plain windows of earlier steps, as they would be had the policy moved as far as in this one."""
        steps = [phase.plain.of(statistic) for phase in self._phases if len(phase.plain) >= rules.MEASURED]
        # a step that has moved nothing (no learning rate yet) says nothing of how uneven a move is
        moved = [(plain, median(plain)) for plain in steps if median(plain) > rules.SMALLEST]
        return tuple(value / unit * max(median_now, rules.SMALLEST) for plain, unit in moved for value in plain)

    def state(self) -> list[dict[str, Any]]:
        """The phases, oldest first, as dicts for JSON; ``restore`` takes them one by one."""
        return [{"lag": self._lag, **asdict(phase)} for phase in self._phases]

    def restore(self, state: Mapping[str, Any]) -> None:
        """One of the phases that ``state`` returned."""
        plain = Windows(tuple(state["plain"]["means"]), tuple(state["plain"]["maxima"]))
        self._phases.append(PlainPhase(int(state["version"]), plain, bool(state["drafted"])))
