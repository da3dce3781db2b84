"""Measurements that replace projected values: of a run with the flag, or of an engine's calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from spec_plugin.api.events import StepTiming
from spec_plugin.step_cost.model import CostModel, StepCost
from spec_plugin_projection.constants import Constants
from spec_plugin_projection.roofline import Deployment, Roofline


@dataclass(frozen=True)
class Work:
    """The responses that a step of a measured run generated."""

    responses: int
    mean: float  # tokens of a response
    longest: float
    prompt: float  # mean tokens


@dataclass(frozen=True)
class StepTimes:
    """Durations in a measured run; they hold for its deployment only."""

    work: Work
    generation_s: float  # of the rollouts of a step
    k: int  # that these were drafted with
    break_even: Mapping[int, tuple[int, float]] = field(default_factory=dict)  # batch size -> k, acceptance length
    logprob_s: float | None = None  # seconds a token, of all sequences of a step
    training_s: float | None = None
    prepare_s: float | None = None  # seconds a step

    @property
    def shown(self) -> Iterator[str]:
        """Sentences that say which projected values these replace."""
        what = f"{self.work.responses} responses, k={self.k}"
        yield f"rollouts of {self.generation_s:.4g} s ({what}), to which all steps are scaled"
        if self.break_even:
            yield f"break-even at batch size {', '.join(map(str, sorted(self.break_even)))}"
        stages = {"log-probs": self.logprob_s, "training": self.training_s, "weight sync": self.prepare_s}
        yield from (f"seconds of {name}" for name, seconds in stages.items() if seconds is not None)


@dataclass(frozen=True)
class Measured:
    """What was measured in a run; empty where nothing was."""

    acceptance: Mapping[int, float] = field(default_factory=dict)  # k -> tokens a step
    times: StepTimes | None = None
    source: str = ""
    refused: str = ""  # why its times are not used


def calibrated(steps: Sequence[StepTiming]) -> CostModel:
    """The cost model of the plugin, from the steps that a calibration ran."""
    cost = CostModel()
    cost.observe(steps, calibration=True)
    return cost


def against_data_sheet(steps: Sequence[StepTiming], deployment: Deployment) -> float:
    """How many times as long these steps took as the roofline of this deployment says, the median."""
    sheet = Roofline(deployment, Constants.typical())
    return median(s.seconds / sheet.seconds(s.batch, s.k, s.paused, s.context) for s in steps)


@dataclass(frozen=True)
class ScaledCost(StepCost):
    """A cost model whose every step takes a factor longer."""

    cost: StepCost
    factor: float

    def seconds(self, batch: float, k: int, paused: bool = True, context: float | None = None) -> float:
        """See ``StepCost.seconds``."""
        return self.factor * self.cost.seconds(batch, k, paused, context)


def draft_pass_from(
    deployment: Deployment, constants: Constants, break_even: Mapping[int, tuple[int, float]], context: float
) -> Constants:
    """The constants, with a draft pass that takes as long as measured break-evens say, the mean of all batch sizes.

    A step is linear in that constant, so each break-even gives one value.

    Args:
        deployment: of the engine that was measured.
        constants: all others.
        break_even: batch size -> k of it (0: one pass that only keeps the draft's cache), acceptance length.
        context: tokens that requests had.
    """
    free = Roofline(deployment, constants.but(draft_pass_s=0.0), context)
    found = []
    for batch, (k, length) in break_even.items():
        beyond = length * free.seconds(batch, 0) - free.seconds(batch, k, paused=False)
        found.append(max(0.0, beyond) / max(1, k))
    return constants.but(draft_pass_s=sum(found) / len(found)) if found else constants
