"""Runs of a trainer under the break-even controller.

Truth. A step of the engine takes what reading the weights takes, and more from some number of tokens on; a draft costs a pass
for each token that it drafts. Every phase has 32 requests whose lengths have a long tail, so that batches drain. The draft
accepts by chances that are what they are in this phase. A machine that is shared makes whole phases slower for a while, by
twice as much now and then. The engine times its steps, reports medians, and drops a draft in the middle of a phase that stays
below break-even (``spec_plugin.engine.schedule.cutoff``). What training promises is off by a factor of the run's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spec_plugin.builtin.break_even.controller import BreakEvenController
from spec_plugin.builtin.break_even.cost import tokens_per_step
from spec_plugin.config import SpecConfig
from spec_plugin.events import DraftRefresh, RefreshReport, RolloutStats, SelfTestReport, StepTiming, TargetInfo
from spec_plugin.method import Method, StartingDraft

K, REQUESTS, TOKENS = 4, 32, 300
#: steps of one kind that the engine looks at before it drops a draft
_GUARD_STEPS = 64
#: log-scale of a phase's seconds, of a timing; how often a busy spell begins, its phases, and by how much it slows
_PHASE, _TIMING = 0.05, 0.02
_BUSY_EVERY, _BUSY_PHASES, _BUSY = 40, 3, 2.0
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


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    ratio: float  # seconds of all phases over those of the same phases without drafts
    missed: int  # phases without drafts where the best table is faster by ``_WORTH``
    slower: int  # phases that drafts made more than 3 % slower
    worth: int  # phases where there was something to miss
    begun: int | None  # first phase that drafted after there was


class _Phase:
    """One rollout phase: lengths, and what they take by a table of k."""

    def __init__(self, rng: np.random.Generator, engine: Engine, chances: tuple[float, ...]) -> None:
        self.lengths = np.sort(np.maximum(8, rng.lognormal(math.log(TOKENS), 0.6, REQUESTS)))
        self.engine, self.chances = engine, chances

    def run(
        self, table: Sequence[int], break_even: Sequence[float] = ()
    ) -> tuple[float, dict[tuple[int, int, bool], float]]:
        """Seconds, and steps by batch size, k, and whether the draft paused."""
        seconds, steps, done = 0.0, dict[tuple[int, int, bool], float](), 0.0
        looked, dropped, paused = 0.0, False, not any(table)
        for index, length in enumerate(self.lengths):
            batch = REQUESTS - index
            k = 0 if dropped else table[min(batch, len(table) - 1)]
            rate = tokens_per_step(self.chances, k)
            left = (length - done) / rate
            losing = bool(break_even) and k > 0 and rate < break_even[min(batch, len(break_even) - 1)]
            if losing and looked + left > _GUARD_STEPS:
                before = max(0.0, _GUARD_STEPS - looked)
                steps[batch, k, False] = steps.get((batch, k, False), 0.0) + before
                seconds += before * self.engine.seconds(batch, k, False)
                left, k, dropped, paused = (left - before) * rate, 0, True, True
            looked += left if k else 0.0
            key = batch, k, paused and not k
            steps[key] = steps.get(key, 0.0) + left
            seconds += left * self.engine.seconds(*key)
            done = float(length)
        return seconds, steps


def _stats(
    rng: np.random.Generator, phase: _Phase, version: int, seconds: float, steps: dict[tuple[int, int, bool], float]
) -> RolloutStats:
    drafts = round(sum(b * n for (b, k, _), n in steps.items() if k))
    by_position, reached = [], 1.0
    for i in range(K):
        reached *= phase.chances[min(i, len(phase.chances) - 1)]
        drafted = sum(b * n for (b, k, _), n in steps.items() if k > i)
        by_position.append(int(rng.binomial(max(0, round(drafted)), min(1.0, reached))))
    timed = tuple(
        StepTiming(b, k, p, phase.engine.seconds(b, k, p) * math.exp(_TIMING * rng.normal()), max(1, round(n)))
        for (b, k, p), n in steps.items()
    )
    return RolloutStats(
        policy_version=version,
        requests=REQUESTS,
        tokens=round(float(phase.lengths.sum())),
        seconds=seconds,
        drafts=drafts,
        draft_tokens=round(sum(k * b * n for (b, k, _), n in steps.items())),
        accepted_tokens=sum(by_position) if drafts else 0,
        accepted_per_pos=tuple(by_position) if drafts else (),
        steps=timed,
    )


def run(truth: Truth, seed: int, phases: int) -> Outcome:
    """One run of so many phases."""
    rng = np.random.default_rng(seed)
    controller = BreakEvenController()
    config = SpecConfig.parse({"k": K})
    target = TargetInfo("", {}, "bfloat16", max_num_seqs=REQUESTS)
    method = Method("simulated", {}, draft=StartingDraft(None, None) if truth.trains else None, ready=not truth.trains)  # type: ignore[arg-type]
    controller.spec_configure(config, target, method)
    kinds = [(b, k, p) for b in (1, 8, 32) for k, p in ((0, True), (0, False), (1, False), (K, False))]
    timings = [StepTiming(*c, truth.engine.seconds(*c) * math.exp(_TIMING * rng.normal()), 16) for c in kinds]
    controller.spec_engine_ready(SelfTestReport((), 1.0, tuple(timings)))
    optimism, busy = math.exp(0.1 * rng.normal()), 0
    all_seconds = plain_seconds = 0.0
    missed = slower = worth = 0
    begun: int | None = None
    for version in range(phases):
        chances = truth.chances(version)
        if truth.trains:
            promised = tuple(min(1.0, c * optimism) for c in chances) if version else ()
            refresh = DraftRefresh(version, version, {}, "", promised)
            controller.spec_refreshed(refresh, RefreshReport(True, version, "", 1.0))
        schedule = controller.spec_schedule(version)
        phase = _Phase(rng, truth.engine, chances)
        seconds, steps = phase.run(schedule.table, schedule.break_even)
        plain = phase.run((0,))[0]
        best = min(phase.run((k,))[0] for k in range(K + 1))
        busy = _BUSY_PHASES if busy == 0 and rng.random() < 1 / _BUSY_EVERY else max(0, busy - 1)
        slow = (_BUSY if busy else 1.0) * math.exp(_PHASE * rng.normal())
        controller.spec_rollout_end(_stats(rng, phase, version, slow * seconds, steps))
        drafted = any(k for _, k, _ in steps)
        pays = plain > _WORTH * best
        worth, missed = worth + pays, missed + (pays and not drafted)
        slower += drafted and seconds > 1.03 * plain
        begun = version if begun is None and pays and drafted else begun
        all_seconds, plain_seconds = all_seconds + seconds, plain_seconds + plain
    return Outcome(float(all_seconds / plain_seconds), int(missed), int(slower), int(worth), begun)


def _flat(chance: float) -> tuple[float, ...]:
    return tuple(chance * 0.97**i for i in range(K))


TRUTHS: Sequence[Truth] = (
    Truth("learns to 0.75 in ten phases", lambda v: _flat(0.75 * (1 - math.exp(-(v + 1) / 5)))),
    Truth("never learns: 0.1", lambda v: _flat(0.1)),
    Truth("good until phase 100, stale from then on", lambda v: _flat(0.75 if v < 100 else 0.1)),
    Truth("brought, good: 0.75, never trained", lambda v: _flat(0.75), trains=False),
    Truth("brought, useless: 0.1, never trained", lambda v: _flat(0.1), trains=False),
    Truth("just about break-even: 0.35", lambda v: _flat(0.35)),
)
