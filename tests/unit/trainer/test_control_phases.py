"""What the control of a phase asks of the engines, and when: the self-test, the refresh, the versions, the share of time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from builders.spec_run import run_of, synced, trained
from builders.training import TARGET, sync

from spec_plugin import LosslessError, SpecConfig
from spec_plugin.api.events import (
    Check,
    DraftRefresh,
    EngineSchedule,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestPart,
    SelfTestReport,
    StepTiming,
)
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle import ledger as ledger_module
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer import slice_budget
from spec_plugin.trainer.spec_run import SpecRun

NOTHING, SMALL_BATCHES = (0,) * (TARGET.max_num_seqs + 1), (0, 3, *(0,) * (TARGET.max_num_seqs - 1))
PASSED = SelfTestReport((Check("greedy", True, ""),), 1.0)
WRONG = SelfTestReport((Check("greedy", False, "3 instead of 4"),), 1.0)
LATE = SelfTestReport((Check("samples", False, "too few", out_of_time=True),), 1.0)


class Engines:
    """A link that writes down what it is asked."""

    def __init__(self, report: SelfTestReport = PASSED) -> None:
        self.calls: list[str] = []
        self.installs: list[tuple[int, bool]] = []
        self.versions: list[int] = []
        self.parts: list[SelfTestPart] = []
        self.report, self.refuses, self.served, self.interrupted = report, False, -1, False

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.installs.append((refresh.draft_version, force))
        if not self.refuses:
            self.served = refresh.draft_version
        return RefreshReport(not self.refuses, self.served, "", 1.0, "refused" if self.refuses else "")

    async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
        self.calls.append("schedule")
        return EngineSchedule(schedule)

    async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
        self.calls.append("self-test")
        self.parts.append(part)
        return self.report

    async def start_phase(self, policy_version: int) -> None:
        self.calls.append("phase")
        self.versions.append(policy_version)

    async def stats(self, policy_version: int) -> RolloutStats:
        self.calls.append("stats")
        return RolloutStats(policy_version, 0, 0, 0.0, interrupted=self.interrupted)


class Chooses:
    """A plugin that offers a draft of one version, and one table."""

    def __init__(self) -> None:
        self.draft_version, self.table = 0, NOTHING
        self.seconds: list[float] = []

    @hookimpl(tryfirst=True)
    def spec_draft_weights(self, event: Any) -> DraftRefresh:
        return DraftRefresh(self.draft_version, event.policy_version, {}, "")

    @hookimpl(tryfirst=True)
    def spec_schedule(self) -> Schedule:
        return Schedule(self.table)

    @hookimpl
    def spec_train_draft(self, seconds: float) -> None:
        self.seconds.append(seconds)


def made(engines: Engines, **options: Any) -> tuple[SpecRun, Chooses]:
    manager, plugin = create_manager(["trainer"], load_entry_points=False), Chooses()
    manager.register(plugin)
    return run_of(SpecSession(SpecConfig(**options), TARGET, manager), engines), plugin


def phase(control: SpecRun, version: int) -> None:
    synced(control, sync(version))
    asyncio.run(control.rollouts_begin())


def test_law_2_the_engine_is_tested_before_the_first_rollout_and_once():
    engines = Engines()
    control, _ = made(engines)
    phase(control, 0)
    phase(control, 1)
    assert engines.calls == ["self-test", "schedule", "phase", "schedule", "phase"]


def test_law_2_a_trained_draft_is_tested_before_it_is_first_served_and_once():
    engines = Engines()
    control, plugin = made(engines)
    phase(control, 0)
    plugin.draft_version = 5
    phase(control, 1)
    assert engines.calls.count("self-test") == 1, "nothing is served yet"
    plugin.table = SMALL_BATCHES
    phase(control, 2)
    assert engines.calls[-3:] == ["self-test", "schedule", "phase"]
    phase(control, 3)
    assert engines.calls[-3:] == ["phase", "schedule", "phase"]


START, DRAFTS, ALL = SelfTestPart.START, SelfTestPart.DRAFTS, SelfTestPart.ALL


@pytest.mark.parametrize(
    ("serve", "version", "parts"),
    [("auto", 0, [START, DRAFTS]), ("auto", 7, [ALL]), ("always", 0, [ALL, DRAFTS]), ("never", 0, [START])],
)
def test_law_2_what_only_a_served_draft_gets_wrong_is_tested_before_one_is_served(serve, version, parts):
    engines = Engines()
    control, plugin = made(engines, serve=serve)
    plugin.draft_version = version
    phase(control, 0)
    assert engines.parts == parts[:1]
    plugin.draft_version, plugin.table = 8, NOTHING if serve == "never" else SMALL_BATCHES
    phase(control, 1)
    phase(control, 2)
    assert engines.parts == parts


def test_law_2_drafts_of_a_draft_that_knows_nothing_are_tested_too_whoever_asks_for_them():
    engines = Engines()
    control, plugin = made(engines)
    plugin.table = SMALL_BATCHES
    phase(control, 0)
    assert engines.parts == [START, DRAFTS] and engines.calls[-2:] == ["schedule", "phase"]
    plugin.draft_version = 1
    phase(control, 1)
    assert engines.parts == [START, DRAFTS, DRAFTS], "only now can its accepted tokens be seen"


def test_law_2_a_self_test_that_fails_stops_the_run_with_its_numbers():
    control, _ = made(Engines(WRONG))
    with pytest.raises(LosslessError, match="greedy: 3 instead of 4"):
        phase(control, 0)
    assert not control.session.failed


@pytest.mark.parametrize(("report", "options"), [(LATE, {}), (WRONG, {"on_self_test_failure": "plain"})])
def test_a_self_test_that_proves_nothing_or_may_fail_costs_speculation_only(report, options):
    engines = Engines(report)
    control, plugin = made(engines, **options)
    plugin.table = SMALL_BATCHES
    phase(control, 0)
    assert "self-test" in (control.session.failure or "") and not control.session.speculating
    assert "phase" in engines.calls


def test_law_5_a_draft_is_forced_in_only_where_the_engines_serve_its_version_already():
    engines = Engines()
    control, plugin = made(engines, self_test=False, serve="always")
    for version, draft in enumerate((0, 0, 1)):
        plugin.draft_version = draft
        phase(control, version)
    assert engines.installs == [(0, False), (0, True), (1, False)]


def test_law_5_a_draft_that_was_refused_is_not_taken_for_the_one_that_is_served():
    engines = Engines()
    control, plugin = made(engines, self_test=False, serve="always")
    plugin.draft_version = 1
    phase(control, 0)
    plugin.draft_version, engines.refuses = 2, True
    phase(control, 1)
    phase(control, 2)
    assert engines.installs == [(1, False), (2, False), (2, False)]


def test_law_6_a_refresh_without_an_answer_turns_speculation_off_and_says_so(caplog):
    class Silent(Engines):
        async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
            raise TimeoutError("no answer")

    control, plugin = made(Silent())
    plugin.table = SMALL_BATCHES
    phase(control, 0)
    assert control.session.failure == "refresh: no answer" and not control.session.speculating
    assert sum("no answer" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize(("table", "drafts"), [(NOTHING, False), (SMALL_BATCHES, True), ((0, 0, 0, 0, 2), True)])
def test_a_phase_that_drafts_at_any_batch_size_is_one_with_drafts(table, drafts):
    control, plugin = made(Engines())
    plugin.table = table
    phase(control, 0)
    assert control.session.speculating == drafts


def test_law_3_the_engines_are_told_the_version_of_the_weights_that_they_got():
    engines = Engines()
    control, _ = made(engines)
    for version in (4, 5, 9):
        phase(control, version)
    assert engines.versions == [4, 5, 9]


def test_a_phase_is_collected_once_however_often_the_trainer_looks_at_it():
    engines = Engines()
    control, _ = made(engines)
    phase(control, 0)
    for _ in range(3):
        asyncio.run(control.rollouts_end())
    assert engines.calls.count("stats") == 1


def test_law_3_once_something_was_cut_short_sequences_may_lag_for_good():
    engines = Engines()
    control, _ = made(engines)
    for version, interrupted in enumerate((True, False)):
        phase(control, version)
        engines.interrupted = interrupted
        asyncio.run(control.rollouts_end())
    assert control.lags


def test_draft_training_gets_its_share_of_what_plain_generation_takes_however_much_drafts_save_of_it():
    control, plugin = made(Engines(), train_share=0.2, head_start=0.0)
    for busy, slowdown in ((10.0, None), (4.0, 2.5), (0.5, None)):
        control.session.ledger.rolled_out(RolloutStats(0, 0, 0, busy, busy_seconds=busy), slowdown)
        trained(control, 0)
    trained(control, 0)
    assert plugin.seconds == [pytest.approx(s) for s in (2.0, 2.0, 0.1, 0.0)], "and none of a step without a rollout"


def test_law_7_where_rollouts_are_hidden_behind_the_trainers_work_drafts_are_worth_no_training(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ledger = ledger_module.Ledger(overlaps=True)
    ledger.waits()
    for work, waited, exposed in ((0.0, 10.0, 10.0), (20.0, 0.0, 0.0), (6.0, 4.0, 4.0)):
        ledger.works()
        now[0] += work
        ledger.waits()
        now[0] += waited
        ledger.rolled_out(RolloutStats(0, 0, 0, 10.0, busy_seconds=10.0), None)
        assert ledger.plain_s == pytest.approx(exposed)
        ledger.close()


def test_a_step_that_was_stopped_earns_what_one_and_a_half_of_the_usual_ones_earn():
    budget = slice_budget.SliceBudget()
    earned = [budget.seconds(plain) for plain in (900.0, 8.0, 10.0, 3600.0, 9.0, *[40.0] * 5)]
    assert earned[:3] == [900.0, 8.0, 10.0], "the first one is what it is"
    assert earned[3:5] == [15.0, 9.0], "an hour's stop, and the step behind it"
    assert earned[5:] == [15.0, 15.0, 40.0, 40.0, 40.0], "steps that are longer for good are usual soon"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("how", ["refused", "none is sent"])
def test_law_5_engines_that_dropped_their_draft_do_not_go_on_without_a_new_one(level, how):
    """After sleep level 2 there is no previous draft to go on with."""
    engines = Engines()
    control, plugin = made(engines, sleep_level=level)
    phase(control, 0)
    assert not control.session.failed
    engines.refuses, plugin.draft_version = how == "refused", 1
    if how == "none is sent":
        control.session.weight_sync = lambda _event: None  # type: ignore[method-assign]
    phase(control, 1)
    assert control.session.failed == (level == 2)


def test_a_method_without_a_draft_has_none_to_lose_in_a_deep_sleep():
    control = run_of(
        SpecSession(SpecConfig(method="ngram", sleep_level=2), TARGET, create_manager(load_entry_points=False)),
        Engines(),
    )
    assert control.session.method.draft is None
    phase(control, 0)
    phase(control, 1)
    assert not control.session.failed


def stepped(control: SpecRun, version: int) -> dict[str, float]:
    """One step of an asynchronous trainer."""
    phase(control, version)
    trained(control, version)
    return control.session.metrics()


@pytest.mark.parametrize(("serve", "goes_on"), [("auto", False), ("always", True)])
def test_where_the_trainer_does_not_wait_for_rollouts_nothing_is_drafted_trained_or_refreshed(serve, goes_on, caplog):
    engines = Engines()
    control, plugin = made(engines, serve=serve)
    plugin.table, plugin.draft_version = SMALL_BATCHES, 1
    stepped(control, 0)
    assert len(engines.installs) == len(plugin.seconds) == 1 and control.session.speculating
    control.session.ledger.hidden = True
    with caplog.at_level("INFO"):
        metrics = stepped(control, 1)
    assert control.session.speculating is goes_on and (metrics["spec/on"] == 1.0) is goes_on
    assert len(engines.installs) == len(plugin.seconds) == 1 + goes_on
    assert (metrics["spec/reason"] == Reason.NOT_WAITED_FOR) is not goes_on
    assert ("does not wait for rollouts" in caplog.text) is not goes_on
    stepped(control, 2)
    assert caplog.text.count("does not wait for rollouts") <= 1, "said once"
    control.session.ledger.hidden = False
    with caplog.at_level("INFO"):
        stepped(control, 3)
    assert control.session.speculating and len(engines.installs) == len(plugin.seconds) == (4 if goes_on else 2)
    assert ("waits for rollouts again" in caplog.text) is not goes_on


def test_where_no_draft_can_come_to_pay_nothing_is_drafted_trained_or_refreshed_and_a_look_is_a_whole_step():
    engines, answers = Engines(), iter([False, False, True, False])
    control, plugin = made(engines)
    plugin.table, plugin.draft_version = SMALL_BATCHES, 1

    class Says:
        @hookimpl(tryfirst=True)
        def spec_can_pay(self) -> bool:
            return next(answers)

    control.session.manager.register(Says())
    installs, slices = [], []
    for version in range(4):
        phase(control, version)
        drafted = control.session.speculating
        asyncio.run(control.rollouts_end())
        trained(control, version)
        installs.append(len(engines.installs))
        slices.append(len(plugin.seconds))
        reason = control.session.metrics()["spec/reason"]
        assert (reason == Reason.NO_OUTLOOK) is (version != 2)
        assert drafted is (version in (0, 3)), version
    assert installs == [1, 1, 1, 2] and slices == [0, 0, 1, 1], "trained behind one rollout, sent before the next"


def test_engines_that_dropped_their_draft_get_one_also_where_nobody_waits_for_rollouts():
    engines = Engines()
    control, _ = made(engines, sleep_level=2)
    control.session.ledger.hidden = True
    phase(control, 0)
    phase(control, 1)
    assert len(engines.installs) == 2 and not control.session.failed


def test_law_2_a_draft_that_comes_back_when_rollouts_are_waited_for_again_is_tested_behind_a_fresh_start():
    engines = Engines()
    control, plugin = made(engines)
    plugin.table, plugin.draft_version = SMALL_BATCHES, 1
    phase(control, 0)
    control.session.recovering = True  # the plain phase of a fresh start is over
    control.session.ledger.hidden = True
    phase(control, 1)
    assert engines.calls[-2:] == ["schedule", "phase"] and len(engines.installs) == 1, "nothing is sent, or tested"
    tests = engines.calls.count("self-test")
    control.session.ledger.hidden = False
    phase(control, 2)
    assert engines.calls.count("self-test") == tests + 1 and engines.installs[-1] == (1, True)
    phase(control, 3)
    assert engines.calls.count("self-test") == tests + 1


def test_what_draft_work_takes_is_what_the_step_has_cost(monkeypatch):
    class Slow(Engines):
        async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
            clock.now += 2.0
            return await super().install(refresh, force)

        async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
            clock.now += 30.0
            return await super().self_test(seconds, part)

        async def stats(self, policy_version: int) -> RolloutStats:
            steps = (StepTiming(1, 0, True, 0.1, 100),)
            return RolloutStats(policy_version, 8, 800, 10.0, steps=steps, busy_seconds=10.0)

    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(ledger_module, "time", clock)
    control, plugin = made(Slow())

    def train(seconds: float) -> None:
        clock.now += 1.0

    monkeypatch.setattr(plugin, "seconds", SimpleNamespace(append=train))
    costs, saved = [], []
    for version in range(2):
        phase(control, version)
        clock.now += 10.0  # rollouts
        asyncio.run(control.rollouts_end())
        clock.now += 5.0  # the trainer's own work
        trained(control, version)
        metrics = control.session.metrics()
        costs.append(metrics["spec/cost_s"])
        saved.append(metrics["spec/saved_s"])
    assert costs == [2.0 + 30.0 + 1.0, 2.0 + 1.0]
    assert saved == [0.0, 0.0] and metrics["spec/net_so_far_s"] == -36.0
