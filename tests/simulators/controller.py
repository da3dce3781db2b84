"""Runs of a trainer under the break-even controller.

Truth. A step of the engine takes what reading the weights takes, and more from some number of tokens on, and of some engines what
reading the KV cache takes; a draft costs a pass for each token that it drafts. Every phase has requests whose lengths have a long
tail, so that batches drain. The draft accepts by chances that are what they are in this phase. The machine is shared: single
steps vary, whole phases vary, and now and then, be it in the middle of a phase, something else runs for a while and makes all
twice as slow. ``AT_SCALE`` has one engine of sixteen, with 1024 requests of up to 16k tokens.

The engine's own parts decide, step by step: the pairs (``spec_plugin.engine.vllm.schedule.pairs``), and the cut-off that drops a
draft (``cutoff``). What training promises is off by a factor of the run's own. What is compared with plain decoding is time
without noise: of the steps that the run chose, and of as many plain ones as the same text takes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import mul

import numpy as np
from numpy.typing import NDArray

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StepPair,
    StepTiming,
    TargetInfo,
)
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.engine.vllm.schedule.cutoff import DraftCutoff
from spec_plugin.engine.vllm.schedule.pairs import PairedSteps
from spec_plugin.engine.vllm.schedule.steps import Timed
from spec_plugin.policy.break_even.controller import BreakEvenController
from spec_plugin.step_cost.bands import Seen, band_of, middle

K, REQUESTS, TOKENS = 4, 32, 100
#: tokens of a prompt; so many latest steps of a kind tell what one takes, as in the engine's step log
_PROMPT, _LATEST = 50.0, 64
#: largest batch that the start-up times
CALIBRATED = 128
#: log-scale of a phase's speed, and of a single step's
_PHASE, _STEP = 0.3, 0.1
#: seconds between busy spells and of one, on average, and by how much it slows
_QUIET_S, _BUSY_S, _BUSY = 60.0, 12.0, 2.0
#: a phase whose best table of k is faster than plain by less than this is nothing to miss
_WORTH = 1.1

#: log-scale of what a measurement of the draft on a thousand tokens is off by
_JUDGED = 0.05

Chances = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True)
class Engine:
    """Seconds of a step."""

    least: float = 10e-3  # reading the weights
    token: float = 0.1e-3  # beyond those that are computed while the weights are read
    beside: int = 16  # so many
    cached: float = 0.0  # a token of the KV cache
    draft: float = 1.2e-3  # a pass
    draft_token: float = 0.01e-3

    def seconds(self, batch: int, k: int, paused: bool, context: float = 0.0) -> float:
        """Of one step with so many requests of that context in the mean, each with k drafted tokens."""
        read = self.cached * batch * context
        return self.target(batch * (k + 1)) + read + (self.drafting(batch, k) if k or not paused else 0.0)

    def target(self, tokens: int) -> float:
        """Of the target's pass over so many tokens."""
        return self.least + self.token * max(0, tokens - self.beside)

    def drafting(self, batch: int, k: int) -> float:
        """Of k drafted tokens for so many requests; with 0 the draft reads."""
        return max(1, k) * (self.draft + self.draft_token * batch)


@dataclass(frozen=True)
class Truth:
    """A kind of run."""

    name: str
    chances: Chances  # of each position, by phase
    trains: bool = True  # does the draft learn, and promise something
    learns: bool = False  # are its chances by phases of draft training, not by phases
    engine: Engine = Engine()
    k: int = K  # most tokens drafted in a step
    requests: int = REQUESTS
    tokens: int = TOKENS  # of a response, the median
    spread: float = 0.6  # log-scale of responses
    least: int = 8  # tokens of any
    most: int | None = None  # where all are cut
    grows: bool = False  # is a step's context told as it is then; else as that of a whole response
    #: drafted steps of the start-up calibration took so many times as long as they do in rollouts
    calibrated: float = 1.0
    whole: bool = False
    at_most: float = 1.03  # what a whole run may take of what it takes without drafts
    told_at_most: float = 1.1  # the same time as the controller tells it, over the true one
    waits: int = 10  # phases in a row, at most, in which a draft that would pay by a tenth is not served
    works: float | None = None  # share of the second half's phases with draft work, at most
    #: of ``make guards``, at most: a long phase takes long here, too
    runs: int | None = None
    phases: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    ratio: float  # seconds of all phases over those of the same phases without drafts
    worst: float  # the same, of the worst 50 phases in a row
    regret: float  # seconds from phase 10 on, or of the second half, over those of the best fixed k of each phase
    missed: int  # phases without drafts where the best k is faster by ``_WORTH``
    slower: int  # phases that drafts made more than 3 % slower
    worth: int  # phases where there was something to miss
    begun: int | None  # first phase that drafted after there was
    waited: int  # most phases in a row that were missed
    paired: float  # share of the steps that were plain only to be compared
    told: float  # seconds without drafts as the controller tells them, over the true ones
    worked: float  # share of the phases with draft work
    work_late: float  # the same, of the second half


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


class Quiet(Machine):
    """A machine that nobody else uses: a step takes what it takes."""

    def took(self, seconds: float) -> float:
        """See ``Machine``."""
        return seconds


class _Alike:
    """Steps of one kind and band, as the engine's step log keeps them."""

    def __init__(self) -> None:
        self.latest: deque[Seen] = deque(maxlen=_LATEST)
        self.steps = self.forwards = 0

    def add(self, batch: int, seconds: float, context: float) -> None:
        """One more."""
        self.latest.append(Seen(seconds, batch, context, 1))
        self.steps, self.forwards = self.steps + 1, self.forwards + batch

    def timing(self, k: int, paused: bool) -> StepTiming:
        """What the engine says of them."""
        found = middle(self.latest)
        return StepTiming(found.batch, k, paused, found.seconds, self.steps, found.context, self.forwards)


class Phase:
    """One rollout phase: how long each response is, and what it takes."""

    def __init__(self, rng: np.random.Generator, truth: Truth, chances: tuple[float, ...]) -> None:
        self.rng, self.truth, self.chances = rng, truth, chances
        lengths = rng.lognormal(math.log(truth.tokens), truth.spread, truth.requests)
        self.lengths = np.clip(lengths, truth.least, truth.most).astype(int)
        self.true = self.measured = 0.0  # seconds without and with noise
        self.alike: dict[tuple[int, int, bool], _Alike] = defaultdict(_Alike)  # by band, k, and was the draft paused
        self.drafted, self.compared = 0, 0
        self.accepted, self.past_end = np.zeros(truth.k, int), np.zeros(truth.k, int)
        self.told = 0.0  # seconds without drafts, as the controller tells them
        self._reached = np.cumprod([self.chances[min(i, len(self.chances) - 1)] for i in range(truth.k)])

    def run(self, machine: Machine, pairs: PairedSteps, table: list[int], cutoff: DraftCutoff) -> None:
        """Step by step, as the engine's scheduler has it."""
        engine, paused, verified = self.truth.engine, not any(table), 0
        running = left = self.lengths  # tokens of the responses that are not complete, and those to come
        whole = int(running.sum())
        while batch := len(left):
            plain = pairs.plain
            k = 0 if plain else table[min(batch, len(table) - 1)]
            grown = (whole - int(left.sum())) / batch
            context = _PROMPT + (grown if self.truth.grows else self.truth.tokens)
            # drafts that were asked for in the step before are verified in this one
            asked, verified = k, min(verified, self.truth.k)
            true = engine.seconds(batch, verified, paused and not k, context)
            took = machine.took(true)
            self.true, self.measured = self.true + true, self.measured + took
            self.compared += plain
            made = self._verify(left, verified, cutoff) if verified else 1
            if verified and cutoff.due and cutoff.drop():
                paused = True
            noted = verified == k
            if noted:
                self.alike[band_of(batch), k, paused and not k].add(batch, took, context)
            pairs.note(Timed(batch, k, took) if noted else None)
            left, verified = left - made, asked
            if left.min() <= 0:
                running, left = running[left > 0], left[left > 0]
                whole = int(running.sum())

    def _verify(self, left: NDArray[np.int_], width: int, cutoff: DraftCutoff) -> NDArray[np.int_]:
        """Tokens that a step with so many drafted ones makes of each request, [batch], of those that are to come, [batch]."""
        batch = len(left)
        draws = self.rng.random((batch, 1)) < np.concatenate(([1.0], self._reached[:width]))
        kept = draws & (np.arange(width + 1) < left[:, None])
        self.drafted += batch
        self.accepted[:width] += draws[:, 1:].sum(0)
        self.past_end[:width] += (draws & ~kept)[:, 1:].sum(0)
        tokens = kept.sum(1)
        for emitted in tokens.tolist():
            cutoff.emitted(batch, emitted)
        made: NDArray[np.int_] = draws.sum(1)
        return made

    def stats(self, version: int, found: Sequence[StepPair]) -> RolloutStats:
        """What the engine says of it."""
        counts = tuple(int(n) for n in self.accepted)
        return RolloutStats(
            policy_version=version,
            requests=self.truth.requests,
            tokens=int(self.lengths.sum()),
            seconds=self.measured,
            drafts=self.drafted,
            draft_tokens=self.drafted * self.truth.k,
            accepted_tokens=sum(counts),
            accepted_per_pos=counts if self.drafted else (),
            past_end_per_pos=tuple(int(n) for n in self.past_end) if self.drafted else (),
            steps=tuple(alike.timing(k, paused) for (_, k, paused), alike in self.alike.items()),
            pairs=tuple(found),
        )

    def expected(self, k: int) -> float:
        """Seconds with a fixed k at every batch size, of responses that come to their ends as these did."""
        steps, seconds, done, before = self._steps(k), 0.0, 0.0, 0
        for index, length in enumerate(np.sort(self.lengths).tolist()):
            context = _PROMPT + (before + length) / 2  # in the mean until this one is complete
            one = self.truth.engine.seconds(self.truth.requests - index, k, True, context)
            seconds += (steps[length] - done) * one
            done, before = steps[length], length
        return seconds

    def _steps(self, k: int) -> list[float]:
        """Steps in the mean until a response of each length has come to its end: in the last one drafts are wasted."""
        reached = np.concatenate(([1.0], self._reached[:k], [0.0]))
        made = reached[:-1] - reached[1:]  # chances that a step makes 1, 2, ... tokens
        made, steps = made.tolist(), [0.0]
        shorter = deque([0.0] * len(made), maxlen=len(made))  # steps of responses that are shorter by 1, 2, ... tokens
        for _ in range(int(self.lengths.max())):
            steps.append(1.0 + sum(map(mul, made, shorter)))
            shorter.appendleft(steps[-1])
        return steps

    @cached_property
    def plain(self) -> float:
        """Seconds without drafts."""
        return self.expected(0)

    @cached_property
    def best(self) -> float:
        """Seconds with the best fixed k, none among them."""
        k = self.truth.k
        ks = (0, k) if self.truth.whole else range(k + 1)
        return min(self.expected(k) for k in ks)


def run(truth: Truth, seed: int, phases: int) -> Outcome:
    """One run of so many phases."""
    rng = np.random.default_rng(seed)
    controller, machine, pairs = _controller(truth, rng), Machine(rng), PairedSteps()
    optimism = math.exp(0.1 * rng.normal())
    ran: list[Phase] = []
    worked: list[bool] = []  # of each phase: is there draft work behind its rollout, and before the next one
    for version in range(phases):
        machine.begin()
        chances, works = truth.chances(sum(worked) if truth.learns else version), not worked or worked[-1]
        if truth.trains and works:
            judged = [math.exp(_JUDGED * rng.normal()) * optimism for _ in chances]
            promised = tuple(min(1.0, c * by) for c, by in zip(chances, judged, strict=True)) if version else ()
            refresh = DraftRefresh(version, version, {}, "", promised)
            controller.spec_refreshed(refresh, RefreshReport(True, version, "", 1.0))
        schedule = controller.spec_schedule(version) if works else Schedule((0,) * (truth.requests + 1))
        phase, table = Phase(rng, truth, chances), list(schedule.table)
        pairs.follow(schedule.plain_share)
        phase.run(machine, pairs, table, DraftCutoff(table, schedule.break_even))
        stats = phase.stats(version, pairs.take())
        controller.spec_rollout_end(stats)
        worked.append(controller.spec_can_pay())
        phase.told = phase.true * (controller.spec_slowdown_without_drafts(stats) or 1.0)
        ran.append(phase)
    return _outcome(ran, worked)


def _controller(truth: Truth, rng: np.random.Generator) -> BreakEvenController:
    controller = BreakEvenController()
    target = TargetInfo("", {}, "bfloat16", max_num_seqs=truth.requests)
    draft = StartingDraft(None, None) if truth.trains else None  # type: ignore[arg-type]
    controller.spec_configure(
        SpecConfig.parse({"k": truth.k}),
        target,
        Method("simulated", {}, draft=draft, pretrained=not truth.trains, all_or_nothing_k=truth.whole),
    )
    sizes = sorted({1, 8, 32, min(truth.requests, CALIBRATED)})
    kinds = [(b, k, p) for b in sizes for k, p in ((0, True), (0, False), (1, False), (truth.k, False))]
    timings = []
    for kind in kinds:
        seconds = truth.engine.seconds(*kind, _PROMPT) * (truth.calibrated if kind[1] else 1.0)
        timings.append(StepTiming(*kind, seconds * math.exp(0.03 * rng.normal()), 16, _PROMPT))
    controller.spec_engine_ready(SelfTestReport((), 1.0, tuple(timings)))
    return controller


def _outcome(ran: Sequence[Phase], worked: Sequence[bool]) -> Outcome:
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
    steps = sum(kind.steps for p in ran for kind in p.alike.values())
    late = min(10, len(ran) // 2)
    return Outcome(
        ratio=float(took.sum() / plain.sum()),
        worst=float((windows[:, 0] / windows[:, 1]).max()),
        regret=float(took[late:].sum() / best[late:].sum()),
        missed=int(missed.sum()),
        slower=int((drafted & (took > 1.03 * plain)).sum()),
        worth=int(worth.sum()),
        begun=int(begun[0]) if len(begun) else None,
        waited=longest,
        paired=sum(p.compared for p in ran) / max(1, steps),
        told=sum(p.told for p in ran) / float(plain.sum()),
        worked=float(np.mean(worked)),
        work_late=float(np.mean(worked[len(worked) // 2 :])),
    )


def always(version: int, chance: float, k: int = K) -> tuple[float, ...]:
    """Chances of a draft that stays what it is: later positions have a little less."""
    return tuple(chance * 0.97**i for i in range(k))


def turns(version: int, before: float, after: float) -> tuple[float, ...]:
    """The same of one that is another from phase 100 on."""
    return always(version, before if version < 100 else after)


def learns(version: int, k: int = K, within: float = 5.0, to: float = 0.75) -> tuple[float, ...]:
    """The same of one that learns, most of it in ten phases."""
    return always(version, to * (1 - math.exp(-(version + 1) / within)), k)


TRUTHS: Sequence[Truth] = (
    Truth("learns to 0.75 in ten phases", learns, at_most=0.75),
    Truth("never learns: 0.1", partial(always, chance=0.1), works=0.15),
    Truth("learns to 0.75 in sixty phases of training", partial(learns, within=30.0), learns=True, at_most=0.85),
    Truth("learns to 0.6 in 160 phases of training", partial(learns, within=80.0, to=0.6), learns=True, at_most=1.0),
    Truth("learns to 0.25 in forty, too little to pay", partial(learns, within=20.0, to=0.25), learns=True),
    Truth(
        "good, on an engine that no draft can make faster",
        partial(always, chance=0.75),
        engine=Engine(least=1e-3, token=1e-3, beside=0),
        works=0.15,
    ),
    Truth("good until phase 100, stale from then on", partial(turns, before=0.75, after=0.1), at_most=0.9),
    Truth("stale until phase 100, good from then on", partial(turns, before=0.1, after=0.75), at_most=0.9, waits=30),
    Truth("brought, good: 0.75, never trained", partial(always, chance=0.75), trains=False, at_most=0.7),
    Truth("brought, useless: 0.1, never trained", partial(always, chance=0.1), trains=False),
    Truth(
        "brought, worthless until phase 100, then good",
        partial(turns, before=0.1, after=0.75),
        trains=False,
        at_most=0.9,
    ),
    Truth("just about break-even: 0.35", partial(always, chance=0.35), at_most=1.0),
    Truth("good, and timed half as long again at start-up", partial(always, chance=0.75), calibrated=1.5, at_most=0.7),
    Truth(
        "middling: 0.4, and timed half as long at start-up",
        partial(always, chance=0.4),
        engine=Engine(draft=4e-3),
        calibrated=0.6,
        told_at_most=1.15,
        at_most=1.09,
    ),
    Truth("all tokens or none, good", partial(always, chance=0.75), whole=True, at_most=0.75),
    Truth("short responses of 24 tokens, good", partial(always, chance=0.7), tokens=24, at_most=0.8, told_at_most=1.15),
    Truth("answers of 3 tokens, good", partial(always, chance=0.7), tokens=3, least=1, at_most=0.9, told_at_most=1.15),
    Truth(
        "answers of 3 tokens, just about break-even",
        partial(always, chance=0.5),
        engine=Engine(draft=4e-3),
        tokens=3,
        least=1,
        at_most=1.05,
    ),
)

#: of a card with some 14 billion parameters: 256 tokens are computed while the weights are read
CARD = Engine(token=0.04e-3, beside=256, draft=0.8e-3, draft_token=2e-6)
_LONG = Truth(
    "",
    learns,
    k=8,
    engine=CARD,
    requests=1024,
    tokens=3000,
    spread=0.8,
    least=32,
    most=16_384,
    grows=True,
    runs=2,
    phases=20,
)
#: one engine of sixteen, with long responses
AT_SCALE: Sequence[Truth] = (
    replace(
        _LONG,
        name="1024 requests of up to 16k, learns to 0.75 in ten phases",
        chances=partial(learns, k=8),
        at_most=0.96,
    ),
    replace(_LONG, name="1024 requests of up to 16k, never learns: 0.1", chances=partial(always, chance=0.1, k=8)),
    replace(
        _LONG,
        name="1024 requests of up to 16k, good, half of a full step reads the cache",
        chances=partial(always, chance=0.75, k=8),
        engine=replace(CARD, cached=10e-9),
        at_most=0.86,
    ),
)
