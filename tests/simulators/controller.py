"""Runs of a trainer under the break-even controller.

Truth. A step of the engine takes what reading the weights takes, and more from some number of tokens on; a draft costs a pass for
each token that it drafts. Every phase has requests whose lengths have a long tail, so that batches drain. The draft accepts by
chances that are what they are in this phase. The machine is shared: single steps vary, whole phases vary, and now and then, be it
in the middle of a phase, something else runs for a while and makes everything twice as slow.

The engine's own parts decide, step by step: the pairs (``spec_plugin.engine.schedule.pairs``), and the cut-off that drops a draft
(``cutoff``). What training promises is off by a factor of the run's own. What is compared with plain decoding is time without
noise: of the steps that the run chose, and of as many plain ones as the same text takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spec_plugin.builtin.break_even.controller import BreakEvenController
from spec_plugin.config import SpecConfig
from spec_plugin.engine.schedule.cutoff import DraftCutoff
from spec_plugin.engine.schedule.pairs import PairedSteps
from spec_plugin.engine.schedule.steps import Timed
from spec_plugin.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    SelfTestReport,
    StepPair,
    StepTiming,
    TargetInfo,
)
from spec_plugin.method import Method, StartingDraft

K, REQUESTS, TOKENS = 4, 32, 100
#: log-scale of a phase's speed, and of a single step's
_PHASE, _STEP = 0.3, 0.1
#: seconds between busy spells and of one, on average, and by how much it slows
_QUIET_S, _BUSY_S, _BUSY = 60.0, 12.0, 2.0
#: a phase whose best table of k is faster than plain by less than this is nothing to miss
_WORTH = 1.1

Chances = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True)
class Engine:
    """Seconds of a step."""

    least: float = 10e-3  # reading the weights
    token: float = 0.1e-3
    draft: float = 1.2e-3  # a pass
    draft_token: float = 0.01e-3

    def seconds(self, batch: int, k: int, paused: bool) -> float:
        """Of one step with so many requests, each with k drafted tokens."""
        target = self.least + self.token * max(0, batch * (k + 1) - 16)
        return target + (max(1, k) * (self.draft + self.draft_token * batch) if k or not paused else 0.0)


@dataclass(frozen=True)
class Truth:
    """A kind of run."""

    name: str
    chances: Chances  # of each position, by phase
    trains: bool = True  # does the draft learn, and promise something
    engine: Engine = Engine()
    tokens: int = TOKENS  # of a response, about
    least: int = 8  # of any
    #: drafted steps of the start-up calibration took so many times as long as they do in rollouts
    calibrated: float = 1.0
    whole: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    ratio: float  # seconds of all phases over those of the same phases without drafts
    worst: float  # the same, of the worst 50 phases in a row
    regret: float  # seconds from phase 10 on over those of the best fixed k of each phase
    missed: int  # phases without drafts where the best k is faster by ``_WORTH``
    slower: int  # phases that drafts made more than 3 % slower
    worth: int  # phases where there was something to miss
    begun: int | None  # first phase that drafted after there was
    waited: int  # most phases in a row that were missed
    paired: float  # share of the steps that were plain only to be compared
    told: float  # seconds without drafts as the controller tells them, over the true ones


class Machine:
    """How much slower than undisturbed: by phase, by spells, and by single steps."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._phase = rng, 1.0
        self._left, self._busy = rng.exponential(_QUIET_S), False

    def begin(self) -> None:
        """A phase begins."""
        self._phase = math.exp(_PHASE * self._rng.normal())

    def took(self, seconds: float) -> float:
        """What a step of so many seconds takes."""
        slow = seconds * self._phase * (_BUSY if self._busy else 1.0) * math.exp(_STEP * self._rng.normal())
        self._left -= slow
        if self._left < 0.0:
            self._busy = not self._busy
            self._left = self._rng.exponential(_BUSY_S if self._busy else _QUIET_S)
        return slow


class Phase:
    """One rollout phase: how long each response is, and what it takes."""

    def __init__(self, rng: np.random.Generator, truth: Truth, chances: tuple[float, ...]) -> None:
        self.rng, self.truth, self.chances = rng, truth, chances
        self.lengths = np.maximum(truth.least, rng.lognormal(math.log(truth.tokens), 0.6, REQUESTS)).astype(int)
        self.true = self.measured = 0.0  # seconds without and with noise
        self.steps: dict[tuple[int, int, bool], list[float]] = {}
        self.drafted, self.compared = 0, 0
        self.accepted, self.past_end = np.zeros(K, int), np.zeros(K, int)
        self.told = 0.0  # seconds without drafts, as the controller tells them
        self._reached = np.cumprod([self.chances[min(i, len(self.chances) - 1)] for i in range(K)])

    def run(self, machine: Machine, pairs: PairedSteps, table: list[int], cutoff: DraftCutoff) -> None:
        """Step by step, as the engine's scheduler has it."""
        engine, left, paused, verified = self.truth.engine, self.lengths.copy(), not any(table), 0
        while len(left):
            batch, plain = len(left), pairs.plain
            k = 0 if plain else table[min(batch, len(table) - 1)]
            # drafts that were asked for in the step before are verified in this one
            asked, verified = k, min(verified, K)
            true = engine.seconds(batch, verified, paused and not k)
            took = machine.took(true)
            self.true, self.measured = self.true + true, self.measured + took
            self.compared += plain
            if verified:
                draws = self.rng.random((batch, 1)) < np.concatenate(([1.0], self._reached[:verified]))
                made = draws.sum(1)
                self.drafted += batch
                kept = draws & (np.arange(verified + 1) < left[:, None])
                self.accepted[:verified] += draws[:, 1:].sum(0)
                self.past_end[:verified] += (draws & ~kept)[:, 1:].sum(0)
                for tokens in kept.sum(1):
                    cutoff.emitted(batch, int(tokens))
                if cutoff.due and not pairs.pending and cutoff.drop():
                    paused = True
            else:
                made = np.ones(batch, int)
            noted = verified == k
            if noted:
                self.steps.setdefault((batch, k, paused and not k), []).append(took)
            pairs.note(Timed(batch, k, paused and not k, took, 100.0) if noted else None)
            left = left - made
            left, verified = left[left > 0], asked

    def stats(self, version: int, found: Sequence[StepPair]) -> RolloutStats:
        """What the engine says of it."""
        timed = tuple(
            StepTiming(*key, float(np.median(t[-64:])), len(t), 50.0 + self.truth.tokens)
            for key, t in self.steps.items()
        )
        counts = tuple(int(n) for n in self.accepted)
        return RolloutStats(
            policy_version=version,
            requests=REQUESTS,
            tokens=int(self.lengths.sum()),
            seconds=self.measured,
            drafts=self.drafted,
            draft_tokens=self.drafted * K,
            accepted_tokens=sum(counts),
            accepted_per_pos=counts if self.drafted else (),
            past_end_per_pos=tuple(int(n) for n in self.past_end) if self.drafted else (),
            steps=timed,
            pairs=tuple(found),
        )

    def expected(self, k: int) -> float:
        """Seconds with a fixed k at every batch size, of responses that come to their ends as these did."""
        steps, seconds, done = self._steps(k), 0.0, 0.0
        for index, length in enumerate(np.sort(self.lengths)):
            seconds += (steps[length] - done) * self.truth.engine.seconds(REQUESTS - index, k, True)
            done = steps[length]
        return seconds

    def _steps(self, k: int) -> list[float]:
        """Steps in the mean until a response of each length has come to its end: in the last one drafts are wasted."""
        reached = np.concatenate(([1.0], self._reached[:k], [0.0]))
        made = reached[:-1] - reached[1:]  # chances that a step makes 1, 2, ... tokens
        steps = [0.0]
        for length in range(1, int(self.lengths.max()) + 1):
            steps.append(1.0 + sum(chance * steps[max(0, length - n)] for n, chance in enumerate(made, 1)))
        return steps

    @cached_property
    def plain(self) -> float:
        """Seconds without drafts."""
        return self.expected(0)

    @cached_property
    def best(self) -> float:
        """Seconds with the best fixed k, none among them."""
        ks = (0, K) if self.truth.whole else range(K + 1)
        return min(self.expected(k) for k in ks)


def run(truth: Truth, seed: int, phases: int) -> Outcome:
    """One run of so many phases."""
    rng = np.random.default_rng(seed)
    controller, machine, pairs = _controller(truth, rng), Machine(rng), PairedSteps()
    optimism = math.exp(0.1 * rng.normal())
    ran: list[Phase] = []
    for version in range(phases):
        machine.begin()
        chances = truth.chances(version)
        if truth.trains:
            promised = tuple(min(1.0, c * optimism) for c in chances) if version else ()
            refresh = DraftRefresh(version, version, {}, "", promised)
            controller.spec_refreshed(refresh, RefreshReport(True, version, "", 1.0))
        schedule = controller.spec_schedule(version)
        phase, table = Phase(rng, truth, chances), list(schedule.table)
        pairs.follow(schedule.plain_share)
        phase.run(machine, pairs, table, DraftCutoff(table, schedule.break_even))
        stats = phase.stats(version, pairs.take())
        controller.spec_rollout_end(stats)
        phase.told = phase.true * (controller.spec_slowdown_without_drafts(stats) or 1.0)
        ran.append(phase)
    return _outcome(ran)


def _controller(truth: Truth, rng: np.random.Generator) -> BreakEvenController:
    controller = BreakEvenController()
    target = TargetInfo("", {}, "bfloat16", max_num_seqs=REQUESTS)
    draft = StartingDraft(None, None) if truth.trains else None  # type: ignore[arg-type]
    controller.spec_configure(
        SpecConfig.parse({"k": K}),
        target,
        Method("simulated", {}, draft=draft, ready=not truth.trains, whole=truth.whole),
    )
    kinds = [(b, k, p) for b in (1, 8, 32) for k, p in ((0, True), (0, False), (1, False), (K, False))]
    timings = [
        StepTiming(
            *c, truth.engine.seconds(*c) * (truth.calibrated if c[1] else 1.0) * math.exp(0.03 * rng.normal()), 16, 50.0
        )
        for c in kinds
    ]
    controller.spec_engine_ready(SelfTestReport((), 1.0, tuple(timings)))
    return controller


def _outcome(ran: Sequence[Phase]) -> Outcome:
    took, plain, best = (np.array([getattr(p, name) for p in ran]) for name in ("true", "plain", "best"))
    worth = plain > _WORTH * best
    drafted = np.array([p.drafted > 0 for p in ran])
    missed = worth & ~drafted
    sums = np.cumsum(np.concatenate([[[0.0, 0.0]], np.stack([took, plain], 1)]), 0)
    windows = sums[50:] - sums[:-50] if len(ran) >= 50 else sums[-1:]
    waited = longest = 0
    for one in missed:
        waited = waited + 1 if one else 0
        longest = max(longest, waited)
    begun = np.flatnonzero(worth & drafted)
    steps = sum(len(t) for p in ran for t in p.steps.values())
    return Outcome(
        ratio=float(took.sum() / plain.sum()),
        worst=float((windows[:, 0] / windows[:, 1]).max()),
        regret=float(took[10:].sum() / best[10:].sum()),
        missed=int(missed.sum()),
        slower=int((drafted & (took > 1.03 * plain)).sum()),
        worth=int(worth.sum()),
        begun=int(begun[0]) if len(begun) else None,
        waited=longest,
        paired=sum(p.compared for p in ran) / max(1, steps),
        told=sum(p.told for p in ran) / float(plain.sum()),
    )


def _flat(chance: float) -> tuple[float, ...]:
    return tuple(chance * 0.97**i for i in range(K))


TRUTHS: Sequence[Truth] = (
    Truth("learns to 0.75 in ten phases", lambda v: _flat(0.75 * (1 - math.exp(-(v + 1) / 5)))),
    Truth("never learns: 0.1", lambda v: _flat(0.1)),
    Truth("good until phase 100, stale from then on", lambda v: _flat(0.75 if v < 100 else 0.1)),
    Truth("stale until phase 100, good from then on", lambda v: _flat(0.1 if v < 100 else 0.75)),
    Truth("brought, good: 0.75, never trained", lambda v: _flat(0.75), trains=False),
    Truth("brought, useless: 0.1, never trained", lambda v: _flat(0.1), trains=False),
    Truth("brought, worthless until phase 100, then good", lambda v: _flat(0.1 if v < 100 else 0.75), trains=False),
    Truth("just about break-even: 0.35", lambda v: _flat(0.35)),
    Truth("good, and timed half as long again at start-up", lambda v: _flat(0.75), calibrated=1.5),
    Truth(
        "middling: 0.4, and timed half as long at start-up",
        lambda v: _flat(0.4),
        engine=Engine(draft=4e-3),
        calibrated=0.6,
    ),
    Truth("all tokens or none, good", lambda v: _flat(0.75), whole=True),
    Truth("short responses of 24 tokens, good", lambda v: _flat(0.7), tokens=24),
    Truth("answers of 3 tokens, good", lambda v: _flat(0.7), tokens=3, least=1),
    Truth(
        "answers of 3 tokens, just about break-even",
        lambda v: _flat(0.5),
        engine=Engine(draft=4e-3),
        tokens=3,
        least=1,
    ),
)
