"""Projects rollouts and trainer steps, with ranges, from model, GPUs, batch, lengths, acceptance and lag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from statistics import median, quantiles

import numpy as np

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.policy.break_even.plan import best
from spec_plugin.step_cost.chances import constant_acceptance, tokens_per_step
from spec_plugin.step_cost.model import StepCost
from spec_plugin_projection.constants import Constants
from spec_plugin_projection.lengths import Lengths, lognormal
from spec_plugin_projection.measured import Measured, ScaledCost, StepTimes, draft_pass_from
from spec_plugin_projection.rollout import SimulatedPhase, Workload, simulate
from spec_plugin_projection.roofline import Deployment, Roofline
from spec_plugin_projection.stages import Stages, exposed_seconds, step_seconds, trainer_seconds

#: k that the table's last row may choose from, as the controller does
CHOICES = (0, 1, 2, 3, 4, 6, 8)
#: draws of all constants and lengths, beside that of typical ones; fewer of larger batches, so that an answer takes seconds
DRAWS, _FEWEST_DRAWS, _FREE_RESPONSES = 24, 6, 16_384
#: a run whose rollouts took so many times longer or shorter than they would here is not one of this deployment
FAR = 4.0
MOST_RESPONSES = 65_536  # simulated, of all steps that are in the engines at once
AUTO = -1  # k by batch size, as the controller would choose


@dataclass(frozen=True)
class Question:
    """A deployment and its work: what is projected."""

    deployment: Deployment
    gpus: int  # that generate
    batch: int  # responses of a step
    lengths: Lengths
    acceptance: Mapping[int, float]  # k -> tokens a step at that k, bonus token included
    ks: tuple[int, ...] = (1, 3, 5, 7)
    prompt: int = 512
    group: int = 8  # responses of one prompt
    seats: int = 256  # most requests that one engine runs at once: vLLM's max_num_seqs
    lag: int = 0  # policy versions that rollouts are ahead of training; 0: synchronous
    train_gpus: int | None = None  # None: the GPUs that generate also train
    logprob_passes: int = 1
    draft_share: float = 0.0  # of the time of a plain step, for draft training
    full_graphs: bool = False  # has the engine with the flag full CUDA graphs: vLLM's V2 runner
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no run can have.

        Raises:
            SpecConfigError: naming the option.
        """
        d = self.deployment
        least = {"--gpus": self.gpus, "--batch": self.batch, "--tp": d.tp, "--ep": d.ep, "--group": self.group}
        least |= {"--seats": self.seats, "--train-gpus": 1 if self.train_gpus is None else self.train_gpus}
        for option, value in least.items():
            if value < 1:
                raise SpecConfigError(f"{option} {value}: at least 1")
        for option, value in {
            "--prompt": self.prompt,
            "--lag": self.lag,
            "--logprob-passes": self.logprob_passes,
        }.items():
            if value < 0:
                raise SpecConfigError(f"{option} {value}: at least 0")
        if self.responses > MOST_RESPONSES:
            raise SpecConfigError(
                f"--batch {self.batch}: at most {MOST_RESPONSES} responses are simulated, those of all --lag steps together; "
                "divide --batch and --gpus by the same number, which is as fast"
            )
        if self.gpus % d.tp:
            raise SpecConfigError(f"--gpus {self.gpus} is no multiple of --tp {d.tp}")
        if d.model.heads % d.tp:
            raise SpecConfigError(
                f"--tp {d.tp}: the {d.model.heads} attention heads of {d.model.name} do not divide by it"
            )
        if d.ep > 1 and (not d.model.experts or d.ep % d.tp or self.gpus % d.ep or d.model.experts % d.ep):
            raise SpecConfigError(
                f"--ep {d.ep}: a multiple of --tp {d.tp} that divides --gpus {self.gpus} and the model's experts, of which it "
                f"has {d.model.experts}"
            )
        if self.lag and self.train_gpus is None:
            raise SpecConfigError(
                f"--lag {self.lag}: such rollouts overlap with training on other GPUs; give --train-gpus"
            )
        for k in self.ks:
            if not 1 <= k <= 16:
                raise SpecConfigError(f"--k {k}: from 1 to 16")
        check_acceptance(self.acceptance)

    @property
    def responses(self) -> int:
        """Responses that are simulated: with lag L, those of L steps are in the engines at once."""
        return self.batch * max(1, self.lag)

    @property
    def draws(self) -> int:
        """How many sets of constants are drawn, beside the typical ones."""
        return min(DRAWS, max(_FEWEST_DRAWS, DRAWS * _FREE_RESPONSES // self.responses))

    @property
    def engines(self) -> int:
        """How many engines share the batch."""
        return self.gpus // self.deployment.tp


def check_acceptance(acceptance: Mapping[int, float]) -> None:
    """Refuse acceptance lengths that no draft can have.

    Raises:
        SpecConfigError: naming the value.
    """
    if not acceptance:
        raise SpecConfigError(
            "no acceptance: give --acceptance K=TOKENS, tokens a step with K drafted ones, bonus token included (published for "
            "math at k=3: 2.4 to 3.3, arXiv 2604.26779), or --from a run"
        )
    for k, length in acceptance.items():
        if not 1 <= k <= 16 or not 1 <= length <= k + 1:
            raise SpecConfigError(
                f"--acceptance {k}={length:g}: with {k} drafted tokens a step emits 1 to {k + 1}, bonus token included"
            )


def chances_through(acceptance: Mapping[int, float]) -> tuple[float, ...]:
    """Acceptance rates by position that give these acceptance lengths; constant between two of them.

    Raises:
        SpecConfigError: if a length falls where k grows, or grows faster than any chance allows.
    """
    chances: list[float] = []
    for k, length in sorted(acceptance.items()):
        low, high = 0.0, 1.0
        if not chances:
            chances += [constant_acceptance(length, k)] * k
            continue
        if not tokens_per_step([*chances, 0.0], k) <= length + 1e-9 <= tokens_per_step([*chances, 1.0], k) + 2e-9:
            raise SpecConfigError(
                f"--acceptance {k}={length:g}: no draft has that, and {tokens_per_step(chances, len(chances)):g} at "
                f"k={len(chances)}"
            )
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if tokens_per_step([*chances, middle], k) < length else (low, middle)
        chances += [(low + high) / 2] * (k - len(chances))
    return tuple(chances)


@dataclass(frozen=True)
class Estimate:
    """The median of the draws, and where nine of ten lie."""

    typical: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of so many draws; of fewer than three their whole range."""
        if len(values) < 3:
            return cls(median(values), min(values), max(values))
        low, *_, high = quantiles(values, n=20, method="inclusive")
        return cls(median(values), low, high)

    def text(self, form: str = ".2f", unit: str = "") -> str:
        """``typical (low-high)``, each in this format."""
        return f"{self.typical:{form}}{unit} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True)
class DrawResult:
    """What one k came to, with one draw of the constants."""

    tokens: float  # a step
    phase: SimulatedPhase
    stages: Stages
    step: float
    exposed: float
    table: tuple[int, ...]


@dataclass(frozen=True)
class ProjectedRow:
    """One k of the answer; 0 is plain, ``AUTO`` is chosen by batch size."""

    k: int
    tokens: float
    rollout_s: Estimate
    rollout_speedup: Estimate
    step_s: Estimate
    step_speedup: Estimate
    exposed_s: Estimate
    table: tuple[int, ...]


@dataclass(frozen=True)
class Projection:
    """Rows, and the plain step that they are compared with."""

    rows: tuple[ProjectedRow, ...]
    stages: Stages  # of a plain step, the median of each
    phase: SimulatedPhase
    seats: int  # that the KV cache has room for, at most what was asked
    measured: Measured  # what of it was used


@dataclass(frozen=True)
class Overrides:
    """Measured values that take the place of the table of constants."""

    pinned: Mapping[str, float] = field(
        default_factory=dict
    )  # constants that are not drawn: field of ``Constants`` -> value
    cost: StepCost | None = None  # of the very engine, which has the flag; then there is no roofline
    measured: Measured = field(default_factory=Measured)


def project(question: Question, known: Overrides | None = None, draws: int | None = None) -> Projection:
    """Simulate plain rollouts and those with each k, for typical constants and for drawn ones.

    Args:
        question: what is asked.
        known: what was measured.
        draws: beside that of typical constants; default: as many as take seconds.
    """
    known = without_foreign_times(question, known or Overrides())
    chances = chances_through(question.acceptance)
    rng = Random(question.seed)
    found = [_Draw(question, known, Constants.typical().but(**known.pinned), question.seed).outcomes(chances)]
    for i, drawn in enumerate(Constants.draws(question.draws if draws is None else draws, rng)):
        found.append(_Draw(question, known, drawn.but(**known.pinned), question.seed + 1 + i).outcomes(chances))
    rows = tuple(_row(k, found) for k in found[0])
    plain = [draw[0].stages for draw in found]
    stages = Stages(**{stage.name: median(getattr(one, stage.name) for one in plain) for stage in fields(Stages)})
    return Projection(rows, stages, found[0][0].phase, max_running(question, known.cost), known.measured)


def without_foreign_times(question: Question, known: Overrides) -> Overrides:
    """Without the times of a run that cannot have been one of this model on these GPUs.

    A run of another deployment still knows what its draft is worth. Its seconds, and its break-evens, hold for it alone.
    """
    times = known.measured.times
    if times is None:
        return known
    factor = times.generation_s / _Draw(question, replace(known, measured=Measured()), Constants.typical(), 0).took(
        times
    )
    if 1 / FAR <= factor <= FAR:
        return known
    refused = f"its rollouts took {factor:.3g} times what they would here, so it was another deployment"
    return replace(known, measured=replace(known.measured, times=None, refused=refused))


def max_running(question: Question, cost: StepCost | None = None) -> int:
    """Requests that one engine runs at once: what is asked, or what the KV cache has room for at the mean length.

    Raises:
        SpecConfigError: if it has no room for the longest alone, or for none of the weights.
    """
    if cost is not None:
        return question.seats
    each, room = question.prompt + question.lengths.mean, question.deployment.cache_tokens()
    if room < question.prompt + question.lengths.longest:
        d = question.deployment
        raise SpecConfigError(
            f"a prompt of {question.prompt} tokens and a response of {question.lengths.longest:.0f} do not fit into the KV cache "
            f"of an engine on {d.tp} {d.card.name}, {room} tokens: split {d.model.name} over more GPUs (--tp), or shorten them"
        )
    return max(1, min(question.seats, int(room / each)))


class _Draw:
    """The simulation with one value of every constant and one set of responses."""

    def __init__(self, question: Question, known: Overrides, constants: Constants, seed: int) -> None:
        self.question, self.times, self.seed = question, known.measured.times, seed
        held = question.prompt + question.lengths.mean / 2
        seen = self.times.break_even if self.times else {}
        flagged = draft_pass_from(question.deployment, constants.with_the_flag(question.full_graphs), seen, held)
        self.constants = constants
        lengths = question.lengths.drawn(question.responses, np.random.default_rng(seed))
        seats = max_running(question, known.cost)
        self.rollout = Workload(lengths, question.prompt, question.group, question.engines, seats)
        self.flagged: StepCost = known.cost or Roofline(question.deployment, flagged, held)
        self.plain: StepCost = known.cost or Roofline(question.deployment, constants, held)
        if self.times is not None:
            factor = self.times.generation_s / self.took(self.times)
            self.flagged, self.plain = ScaledCost(self.flagged, factor), ScaledCost(self.plain, factor)

    def took(self, times: StepTimes) -> float:
        """Seconds of a measured run's rollouts, if it had run here."""
        work, chances = times.work, chances_through(self.question.acceptance)
        lengths = lognormal(work.mean, work.longest).drawn(work.responses, np.random.default_rng(self.seed))
        rollout = replace(self.rollout, lengths=lengths, prompt=work.prompt)
        return simulate(rollout, self.flagged, chances, times.k, np.random.default_rng(self.seed)).seconds

    def outcomes(self, chances: Sequence[float]) -> dict[int, DrawResult]:
        """Of rollouts without the flag, each k, and the controller's table; all with the same responses."""
        question = self.question
        plain = self._phase(self.plain, chances, (0,))
        most = max(plain.load)
        choices = [k for k in CHOICES if k <= max(question.ks)]
        load = {float(batch): tokens for batch, tokens in plain.load.items()}
        chosen = best(self.flagged, chances, load, (0,) * (most + 1), choices).table
        tables: dict[int, tuple[int, ...]] = {0: (0,), **{k: (k,) for k in question.ks}, AUTO: chosen}
        share = question.draft_share * step_seconds(self._stages(plain, 0.0), question.lag)
        found = {}
        for k, table in tables.items():
            phase = self._phase(self.flagged, chances, table) if k else plain
            stages = self._stages(phase, share if k else 0.0)
            tokens, lag = tokens_per_step(chances, table[-1]), question.lag
            found[k] = DrawResult(tokens, phase, stages, step_seconds(stages, lag), exposed_seconds(stages, lag), table)
        return found

    def _phase(self, cost: StepCost, chances: Sequence[float], table: tuple[int, ...]) -> SimulatedPhase:
        return simulate(self.rollout, cost, chances, table, np.random.default_rng(self.seed))

    def _stages(self, phase: SimulatedPhase, draft: float) -> Stages:
        """A step's; with lag L, L batches were simulated together."""
        question, times = self.question, self.times
        sequences = question.prompt + np.array(question.lengths.quantiles)
        tokens = question.batch * float(np.mean(sequences))
        d = question.deployment
        logprob, training = trainer_seconds(
            d.model,
            d.card,
            question.train_gpus or question.gpus,
            tokens,
            float(np.mean(sequences**2) / np.mean(sequences)),
            self.constants,
            question.logprob_passes,
        )
        if times is not None:
            logprob = logprob if times.logprob_s is None else times.logprob_s * tokens * question.logprob_passes
            training = training if times.training_s is None else times.training_s * tokens
        prepare = times.prepare_s if times is not None and times.prepare_s is not None else self.constants.prepare_s
        return Stages(prepare, phase.seconds / max(1, question.lag), logprob, training, draft)


def _row(k: int, found: Sequence[Mapping[int, DrawResult]]) -> ProjectedRow:
    plain = [draw[0] for draw in found]
    mine = [draw[k] for draw in found]
    return ProjectedRow(
        k,
        mine[0].tokens,
        Estimate.of([o.phase.seconds for o in mine]),
        Estimate.of([p.phase.seconds / o.phase.seconds for p, o in zip(plain, mine, strict=True)]),
        Estimate.of([o.step for o in mine]),
        Estimate.of([p.step / o.step for p, o in zip(plain, mine, strict=True)]),
        Estimate.of([o.exposed for o in mine]),
        mine[0].table,
    )
