"""Runs of an asynchronous trainer: is it noticed that nobody waits for rollouts, and never where somebody would without drafts?

Truth. In each phase the engine samples the next batch while the trainer works on the last one; the phase ends when both are done.
The engine has few places, so requests queue and their prompts are read amid the others' decoding; many sample a stretch without
drafts (the control group, whose share is large where a batch is small), so that nearly no two steps are alike. What the same
requests take without drafts, on a machine without noise, is the truth that decides.

The step log, the pairs, the control group, the controller and the ledger are the engine's and the trainer's own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from simulators.controller import Engine, Machine
from spec_plugin import ledger as ledger_module
from spec_plugin.actor.judged import share_for
from spec_plugin.builtin.break_even.controller import BreakEvenController
from spec_plugin.config import SpecConfig
from spec_plugin.engine.control import ControlGroup
from spec_plugin.engine.schedule.pairs import PairedSteps
from spec_plugin.engine.schedule.steps import StepLog
from spec_plugin.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StepTiming,
    TargetInfo,
)
from spec_plugin.ledger import Ledger
from spec_plugin.method import Method, StartingDraft

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
    prompt: int = 60
    share: float | None = None  # of the control group; None: as a run of that batch has it
    calibrated: float = (
        1.0  # drafted steps of the start-up calibration took so many times as long as they do in rollouts
    )
    quiet: bool = False  # is the machine nobody else's
    noticed: int | None = None  # phases within which it must be found hidden


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
class _Request:
    length: int
    chance: float
    plain: tuple[int, int]  # tokens that are sampled without drafts
    prompt: int
    made: int = 0
    width: int = 0  # drafted tokens that the next step verifies


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


def _requests(rng: np.random.Generator, setting: Setting, group: ControlGroup) -> list[_Request]:
    made = []
    for _ in range(setting.requests):
        length = max(8, int(rng.lognormal(math.log(setting.tokens), 0.5)))
        stretch = group.draw()
        low, high = stretch.extra_args["spec_off"] if stretch else (0, 0)
        group.ended(length)
        chance = min(0.98, setting.chance * math.exp(0.1 * rng.normal()))
        made.append(_Request(length, chance, (low, high), setting.prompt))
    return made


def sample(
    rng: np.random.Generator,
    requests: Sequence[_Request],
    table: Sequence[int],
    machine: Machine | None = None,
    log: StepLog | None = None,
    pairs: PairedSteps | None = None,
) -> _Batch:
    """Step by step, as an engine's scheduler has it."""
    engine, out, queue, running = Engine(), _Batch(), deque(requests), list[_Request]()
    for request in requests:
        request.made = request.width = 0
    idle = not any(table)
    while queue or running:
        new = [queue.popleft() for _ in range(min(PLACES - len(running), len(queue)))]
        running += new
        lookup = [0] * len(table) if pairs is not None and pairs.plain else table
        k, batch = lookup[len(running)], len(running)
        verified = sum(1 + request.width for request in running)
        target = engine.least + engine.token * max(0, verified - 16) + _READING_S * sum(r.prompt for r in new)
        drafting = 0.0 if idle else max(1, k) * (engine.draft + engine.draft_token * batch)
        true = target + drafting
        if log is not None:
            log.begin(_output(running, new), lookup, out.seconds, idle)
        out.true += true
        out.seconds += true if machine is None else machine.took(true)
        for request in running:
            request.made += 1
            if request.width:
                out.drafts += 1
                come = int(np.argmin(np.append(rng.random(request.width) < request.chance, False)))
                out.per_pos[:come] += 1
                if log is not None:
                    log.accept(batch, come, min(come, max(0, request.length - request.made)))
                request.made += come
            low, high = request.plain
            request.width = 0 if low <= request.made < high else k
        running = [request for request in running if request.made < request.length]
        if log is not None and pairs is not None:
            if not queue and not running:
                log.interrupt(out.seconds)
            pairs.note(log.end(out.seconds))
    return out


def _output(running: Sequence[_Request], new: Sequence[_Request]) -> SimpleNamespace:
    names = {id(request): str(i) for i, request in enumerate(running)}
    scheduled = {names[id(r)]: r.width + 1 for r in running} | {names[id(r)]: r.prompt for r in new}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens={names[id(r)]: [7] * r.width for r in running if r.width},
        scheduled_new_reqs=[SimpleNamespace(req_id=names[id(r)], num_computed_tokens=0) for r in new],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[r.prompt + r.made for r in running]),
    )


def _stats(version: int, log: StepLog, pairs: PairedSteps, batch: _Batch, requests: Sequence[_Request]) -> RolloutStats:
    """As ``EngineFront.stats`` has them."""
    steps, accepted = tuple(log.take()), tuple(int(n) for n in batch.per_pos)
    decoding = sum(s.seconds * s.steps for s in steps) + sum(m.seconds for m in log.mixed if not m.prompts)
    return RolloutStats(
        policy_version=version,
        requests=len(requests),
        tokens=sum(r.length for r in requests),
        seconds=batch.seconds,
        drafts=batch.drafts,
        draft_tokens=batch.drafts * K,
        accepted_tokens=sum(accepted),
        accepted_per_pos=accepted if batch.drafts else (),
        steps=steps,
        pairs=tuple(pairs.take()),
        mixed=tuple(log.mixed),
        kept_by_batch=tuple(log.kept),
        past_end_per_pos=tuple(log.past_end),
        busy_seconds=min(batch.seconds, max(decoding, log.busy_seconds)),
    )


def run(setting: Setting, seed: int, phases: int) -> Outcome:
    """One run of so many phases."""
    rng, clock = np.random.default_rng(seed), _Clock()
    controller, machine, ledger = _controller(setting, rng), Machine(rng), Ledger(overlaps=True)
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
            plain = sample(rng, requests, [0] * (PLACES + 1))
            waited, longest = waited + max(0.0, plain.true - works), longest + max(plain.true, works)
            schedule = controller.spec_schedule(version)
            if ledger.hidden:
                off, schedule = off + 1, Schedule((0,) * (PLACES + 1))
            pairs.follow(schedule.plain_share)
            batch = sample(rng, requests, schedule.table, None if setting.quiet else machine, log, pairs)
            _pass(clock, ledger, works, batch.seconds)
            stats = _stats(version, log, pairs, batch, requests)
            controller.spec_rollout_end(stats)
            usual = controller.spec_slowdown_without_drafts(stats)
            ledger.rolled_out(stats, usual, [(stats, controller.spec_max_slowdown_without_drafts(stats))])
            first = version if first is None and ledger.hidden else first
            if stats.drafts:
                drafted, known = drafted + 1, known + (usual is not None)
                longer = ((usual or 1.0) - 1.0) * stats.busy_seconds / stats.seconds  # as the ledger counts it
                told, true_plain = told + batch.true * (1.0 + longer), true_plain + plain.true
                steps += sum(s.steps for s in stats.steps) + sum(m.steps for m in stats.mixed)
                mixed += sum(m.steps for m in stats.mixed)
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
    return float(np.mean([sample(rng, _requests(rng, setting, group), [0] * (PLACES + 1)).true for _ in range(20)]))


def _controller(setting: Setting, rng: np.random.Generator) -> BreakEvenController:
    controller = BreakEvenController()
    draft = StartingDraft(None, None)  # type: ignore[arg-type]
    target = TargetInfo("", {}, "bfloat16", max_num_seqs=PLACES)
    controller.spec_configure(SpecConfig.parse({"k": K}), target, Method("simulated", {}, draft=draft))
    engine, kinds = Engine(), [(b, k, p) for b in (1, 4, 8) for k, p in ((0, True), (0, False), (1, False), (K, False))]
    timings = [
        StepTiming(
            *kind,
            engine.seconds(*kind) * (setting.calibrated if kind[1] else 1.0) * math.exp(0.03 * rng.normal()),
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
    Setting("works for 1.5 batches, quiet machine", 1.5, quiet=True, noticed=10),
    Setting("works for 1.5 batches", 1.5),
    Setting("works for 0.9 of a batch", 0.9),
    Setting("works for 0.9 of a batch, half of them control group", 0.9, share=0.5),
    Setting("works for 0.9 of a batch, half of the time prompts", 0.9, prompt=1000),
    Setting("works for 0.9 of a batch, timed half as long again at start-up", 0.9, calibrated=1.5),
    Setting("works for 0.9 of a batch of 8, which drains", 0.9, requests=8),
    Setting("works for 0.4 of a batch", 0.4),
)
