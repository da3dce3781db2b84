"""Runs of an asynchronous trainer: is it noticed that nobody waits for rollouts, and never where somebody would without drafts?

Truth. In each phase the engine samples the next batch while the trainer works on the last one; the phase ends when both are done.
The engine has few places, so requests queue and their prompts are read amid the others' decoding; many sample a stretch without
drafts (the control group, whose share is large where a batch is small), so that nearly no two steps are alike. What the same
requests take without drafts, on a machine without noise, is the truth that decides.

The step log, the pairs, the control group, the controller and the ledger are the engine's and the trainer's own.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from simulators.controller import CALIBRATED, CARD, Engine, Machine, Quiet
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StepTiming,
    TargetInfo,
)
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.engine.control_group import ControlGroup
from spec_plugin.engine.vllm.schedule.pairs import PairedSteps
from spec_plugin.engine.vllm.schedule.steps import StepLog
from spec_plugin.lifecycle import ledger as ledger_module
from spec_plugin.lifecycle.ledger import Ledger
from spec_plugin.policy.break_even.controller import BreakEvenController
from spec_plugin.trainer.judged import share_for

_ENGINE = Engine()
Ints = NDArray[np.int_]
K, PLACES = 3, 8
#: from the sync to the first request, and seconds to read a token of a prompt
_IDLE_S, _READING_S = 0.05, 0.05e-3


@dataclass(frozen=True)
class Setting:
    """A kind of run."""

    name: str
    works: float  # the trainer, in the seconds that a batch takes without drafts, about
    chance: float = 0.7  # of a drafted token to be accepted, about
    requests: int = 16  # of a batch
    tokens: int = 100  # of a response, about
    spread: float = 0.5  # log-scale of responses
    most: int = 1 << 30  # tokens where all are cut
    places: int = PLACES  # of the engine
    engine: Engine = _ENGINE
    prompt: int = 60
    share: float | None = None  # of the control group; None: as a run of that batch has it
    calibrated: float = (
        1.0  # drafted steps of the start-up calibration took so many times as long as they do in rollouts
    )
    quiet: bool = False  # is the machine nobody else's
    noticed: int | None = None  # phases within which it must be found hidden
    #: of ``make guards``, at most: a long phase takes long here, too
    runs: int | None = None
    phases: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    exposed: float  # share of the phases, as long as they are without drafts, for which the trainer waits there
    first: int | None  # phase behind which it was first found hidden
    hidden: int  # phases in which nothing was drafted since it was
    phases: int
    mixed: float  # share of the steps with drafts that were not alike
    told: float  # seconds without drafts as the controller tells them over the true ones; of phases that drafted
    known: float  # share of those of which it told any


@dataclass
class _Requests:
    """Of one batch, [n] each."""

    length: Ints
    chance: NDArray[np.float64]
    plain: Ints  # [n, 2]: the tokens from here until there are sampled without drafts
    prompt: int

    def __len__(self) -> int:
        return len(self.length)


@dataclass
class _Batch:
    """What the engine took for one batch of requests."""

    seconds: float = 0.0  # as measured
    true: float = 0.0  # without the machine's noise
    drafts: int = 0
    per_pos: np.ndarray = field(default_factory=lambda: np.zeros(K, int))


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def _requests(rng: np.random.Generator, setting: Setting, group: ControlGroup) -> _Requests:
    length, chance, plain = [], [], []
    for _ in range(setting.requests):
        length.append(min(setting.most, max(8, int(rng.lognormal(math.log(setting.tokens), setting.spread)))))
        stretch = group.draw()
        plain.append(stretch.extra_args["spec_off"] if stretch else [0, 0])
        group.ended(length[-1])
        chance.append(min(0.98, setting.chance * math.exp(0.1 * rng.normal())))
    return _Requests(np.array(length), np.array(chance), np.array(plain), setting.prompt)


def plain_seconds(engine: Engine, requests: _Requests, places: int) -> float:
    """What they take without drafts and without the machine's noise: between two ends of requests all steps are alike."""
    waiting, running, now, seconds = deque(requests.length.tolist()), list[int](), 0, 0.0
    while waiting or running:
        new = min(places - len(running), len(waiting))
        for _ in range(new):
            heapq.heappush(running, now + waiting.popleft())  # the step in which it is complete
        batch, steps = len(running), running[0] - now
        seconds += steps * engine.seconds(batch, 0, True) + _READING_S * new * requests.prompt
        now += steps
        while running and running[0] == now:
            heapq.heappop(running)
    return seconds


class _Running:
    """The requests that have a place in the engine, in the order in which they got it."""

    def __init__(self, requests: _Requests) -> None:
        self.all, self.waiting = requests, 0  # the first one without a place yet
        self.index = np.zeros(0, int)
        self.made = np.zeros(len(requests), int)
        self.width = np.zeros(len(requests), int)  # drafted tokens that the next step verifies

    def admit(self, places: int) -> int:
        """As many as there is room for; how many."""
        new = min(places - len(self.index), len(self.all) - self.waiting)
        if new:
            self.index = np.concatenate([self.index, np.arange(self.waiting, self.waiting + new)])
            self.waiting += new
        return new

    @property
    def over(self) -> bool:
        """Are all complete."""
        return not len(self.index) and self.waiting == len(self.all)

    def step(self, rng: np.random.Generator, k: int, out: _Batch, log: StepLog | None) -> None:
        """Each has one token more, and what is accepted of its draft; then drafts of k are asked for."""
        index, requests = self.index, self.all
        self.made[index] += 1
        drafted = index[self.width[index] > 0]
        if len(drafted):
            width = int(self.width[drafted[0]])  # all that was drafted was drafted in the step before
            draws = rng.random((len(drafted), width)) < requests.chance[drafted, None]
            come = np.logical_and.accumulate(draws, 1).sum(1)
            out.drafts += len(drafted)
            out.per_pos[:width] += (come[:, None] > np.arange(width)).sum(0)
            if log is not None:
                room = np.maximum(0, requests.length[drafted] - self.made[drafted])
                for accepted, kept in zip(come.tolist(), np.minimum(come, room).tolist(), strict=True):
                    log.accept(accepted, kept)
            self.made[drafted] += come
        made, plain = self.made[index], requests.plain[index]
        self.width[index] = np.where((plain[:, 0] <= made) & (made < plain[:, 1]), 0, k)
        self.index = index[made < requests.length[index]]


def sample(
    rng: np.random.Generator,
    engine: Engine,
    requests: _Requests,
    table: Sequence[int],
    machine: Machine,
    log: StepLog,
    pairs: PairedSteps,
) -> _Batch:
    """Step by step, as an engine's scheduler has it; its places are as many as the table has batch sizes."""
    out, running, idle = _Batch(), _Running(requests), not any(table)
    none, names = [0] * len(table), [str(i) for i in range(len(requests))]
    while not running.over:
        new = running.admit(len(table) - 1)
        lookup = none if pairs.plain else table
        batch = len(running.index)
        widths = running.width[running.index]
        true = engine.target(batch + int(widths.sum())) + _READING_S * requests.prompt * new
        true += 0.0 if idle else engine.drafting(batch, lookup[batch])
        log.begin(_output(running, widths.tolist(), new, names), lookup, out.seconds, idle)
        out.true += true
        out.seconds += machine.took(true)
        running.step(rng, lookup[batch], out, log)
        if running.over:
            log.interrupt(out.seconds)
        pairs.note(log.end(out.seconds))
    return out


def _output(running: _Running, widths: Sequence[int], new: int, names: Sequence[str]) -> SimpleNamespace:
    """The ``SchedulerOutput`` of a step, as far as the step log reads it; the last ones that run are new."""
    here, prompt = [names[i] for i in running.index.tolist()], running.all.prompt
    fresh = here[len(here) - new :]
    scheduled = dict(zip(here, [width + 1 for width in widths], strict=True)) | dict.fromkeys(fresh, prompt)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens={name: [7] * w for name, w in zip(here, widths, strict=True) if w},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in fresh],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=(prompt + running.made[running.index]).tolist()),
    )


def _stats(version: int, log: StepLog, pairs: PairedSteps, batch: _Batch, requests: _Requests) -> RolloutStats:
    """As ``EngineFront.stats`` has them."""
    steps, accepted = tuple(log.take()), tuple(int(n) for n in batch.per_pos)
    decoding = sum(s.total for s in steps if not s.prompts)
    return RolloutStats(
        policy_version=version,
        requests=len(requests),
        tokens=int(requests.length.sum()),
        seconds=batch.seconds,
        drafts=batch.drafts,
        draft_tokens=batch.drafts * K,
        accepted_tokens=sum(accepted),
        accepted_per_pos=accepted if batch.drafts else (),
        steps=steps,
        pairs=tuple(pairs.take()),
        past_end_per_pos=tuple(log.past_end),
        busy_seconds=min(batch.seconds, max(decoding, log.busy_seconds)),
    )


def run(setting: Setting, seed: int, phases: int) -> Outcome:
    """One run of so many phases."""
    rng, clock = np.random.default_rng(seed), _Clock()
    controller, ledger = _controller(setting, rng), Ledger(overlaps=True)
    machine = Quiet(rng) if setting.quiet else Machine(rng)
    share = share_for(0.02, setting.requests) if setting.share is None else setting.share
    group, log, pairs = ControlGroup(share, K, seed), StepLog(), PairedSteps()
    works = setting.works * _usual_seconds(setting)
    waited = longest = told = true_plain = 0.0
    steps, mixed, drafted, known, off, first = 0, 0, 0, 0, 0, None
    with patch.object(ledger_module, "time", clock):
        ledger.waits()
        for version in range(phases):
            machine.begin()
            requests = _requests(rng, setting, group)
            plain = plain_seconds(setting.engine, requests, setting.places)
            waited, longest = waited + max(0.0, plain - works), longest + max(plain, works)
            schedule = controller.spec_schedule(version)
            if ledger.hidden:
                off, schedule = off + 1, Schedule((0,) * (setting.places + 1))
            pairs.follow(schedule.plain_share)
            batch = sample(rng, setting.engine, requests, schedule.table, machine, log, pairs)
            _pass(clock, ledger, works, batch.seconds)
            stats = _stats(version, log, pairs, batch, requests)
            controller.spec_rollout_end(stats)
            usual = controller.spec_slowdown_without_drafts(stats)
            ledger.rolled_out(stats, usual)
            first = version if first is None and ledger.hidden else first
            if stats.drafts:
                drafted, known = drafted + 1, known + (usual is not None)
                longer = ((usual or 1.0) - 1.0) * stats.busy_seconds / stats.seconds  # as the ledger counts it
                told, true_plain = told + batch.true * (1.0 + longer), true_plain + plain
                steps += sum(s.steps for s in stats.steps)
                mixed += sum(s.steps for s in stats.steps if not s.alike)
    return Outcome(
        exposed=waited / longest,
        first=first,
        hidden=off,
        phases=phases,
        mixed=mixed / max(1, steps),
        told=told / true_plain if true_plain else 1.0,
        known=known / max(1, drafted),
    )


def _pass(clock: _Clock, ledger: Ledger, works: float, generates: float) -> None:
    """The trainer works, and waits for the rollouts if they take longer."""
    ledger.works()
    clock.now += works
    ledger.close()
    ledger.waits()
    clock.now += _IDLE_S + max(0.0, generates - works)


def _usual_seconds(setting: Setting) -> float:
    """What a batch takes without drafts, in the mean."""
    rng = np.random.default_rng(0)
    group = ControlGroup(0.0, K, 0)
    batches = [_requests(rng, setting, group) for _ in range(20)]
    return float(np.mean([plain_seconds(setting.engine, batch, setting.places) for batch in batches]))


def _controller(setting: Setting, rng: np.random.Generator) -> BreakEvenController:
    controller = BreakEvenController()
    draft = StartingDraft(None, None)  # type: ignore[arg-type]
    target = TargetInfo("", {}, "bfloat16", max_num_seqs=setting.places)
    controller.spec_configure(SpecConfig.parse({"k": K}), target, Method("simulated", {}, draft=draft))
    sizes = (1, 4, 8) if setting.places == PLACES else (1, 8, 32, min(setting.places, CALIBRATED))
    kinds = [(b, k, p) for b in sizes for k, p in ((0, True), (0, False), (1, False), (K, False))]
    timings = [
        StepTiming(
            *kind,
            setting.engine.seconds(*kind) * (setting.calibrated if kind[1] else 1.0) * math.exp(0.03 * rng.normal()),
            16,
            50.0,
        )
        for kind in kinds
    ]
    controller.spec_engine_ready(SelfTestReport((), 1.0, tuple(timings)))
    refresh = DraftRefresh(1, 0, {}, "", (setting.chance,) * K)
    controller.spec_refreshed(refresh, RefreshReport(True, 1, "", 1.0))
    return controller


SETTINGS: Sequence[Setting] = (
    Setting("works for 2.5 batches", 2.5, noticed=10),
    Setting("works for 2.5 batches, draft of little use", 2.5, chance=0.4, noticed=10),
    Setting("works for 2.5 batches, half of the time prompts", 2.5, prompt=1000, noticed=10),
    Setting("works for 1.5 batches, quiet machine", 1.5, quiet=True, noticed=20),
    Setting("works for 1.5 batches", 1.5),
    Setting("works for 0.9 of a batch", 0.9),
    Setting("works for 0.9 of a batch, half of them control group", 0.9, share=0.5),
    Setting("works for 0.9 of a batch, half of the time prompts", 0.9, prompt=1000),
    Setting("works for 0.9 of a batch, timed half as long again at start-up", 0.9, calibrated=1.5),
    Setting("works for 0.9 of a batch of 8, which drains", 0.9, requests=8),
    Setting("works for 0.4 of a batch", 0.4),
)
_LONG = Setting("", 2.5, requests=1024, tokens=3000, spread=0.8, most=16_384, places=256, engine=CARD, runs=2, phases=6)
#: one engine of sixteen, with long responses
AT_SCALE: Sequence[Setting] = (
    replace(_LONG, name="1024 responses of up to 16k, 256 places, works for 2.5 batches", noticed=10),
    replace(_LONG, name="1024 responses of up to 16k, 256 places, works for 0.8 of a batch", works=0.8),
)
