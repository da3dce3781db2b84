"""Draft trouble is to heal: off at once, then a fresh start when the cause may be gone, a bounded number of times."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from builders.ranks import on_two_ranks
from builders.recovery import Run
from builders.spec_run import run_of, synced, trained
from builders.training import TARGET, hidden, sync

from spec_plugin import LosslessError, SpecConfig, hookimpl
from spec_plugin.api.events import Check, SelfTestReport
from spec_plugin.lifecycle.recovery import FIRST, Recovery
from spec_plugin.lifecycle.session import SpecSession


def test_trouble_that_is_over_heals_with_a_plain_phase_a_refresh_and_a_self_test(caplog):
    caplog.set_level(logging.WARNING, logger="spec_plugin")
    run = Run()
    for _ in range(4):  # the engines are tested, the last time with a trained draft
        assert "drafts" in run.step()
    run.engines.broken = "install"
    assert run.step()[-1] == "plain" and run.session.failed
    run.engines.broken = ""
    for _ in range(FIRST - 1):
        assert run.step() == ["plain"] and run.session.metrics()["spec/failed"] == 1.0
    assert run.step() == ["plain"] and not run.session.failed, "to compare with"
    assert run.session.metrics()["spec/recoveries"] == 1.0 and run.session.metrics()["spec/failed"] == 0.0
    assert run.step() == ["install", "self_test", "drafts"]
    assert run.engines.forced[-1], "whatever the engines hold by now"
    for _ in range(30):
        assert "drafts" in run.step()
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "Weight syncs until it is tried again: 8" in said[0]
    assert "drafts are tried again (1 of 5 times, spec.recoveries)" in said[1] and "install is broken" in said[1]


@pytest.mark.parametrize("times", [0, 1, 3])
def test_trouble_that_stays_is_tried_at_steps_that_double_and_no_more_often_than_was_asked_for(times):
    run = Run(recoveries=times)
    run.engines.broken = "install"
    tried = [run.version - 1 for _ in range(200) if "install" in run.step()]
    expected = [0]
    for n in range(times):
        expected.append(expected[-1] + FIRST * 2**n + 1)  # the phase before is the plain one
    assert tried == expected and run.session.failed


def test_trouble_in_the_plain_phase_of_a_fresh_start_counts_as_the_next_failure():
    run = Run(recoveries=2)
    run.engines.broken = "install"
    for _ in range(FIRST):
        run.step()
    run.engines.broken = "plain"
    run.step()
    assert run.session.failed, "the plain phase"
    run.engines.broken = ""
    asked = [run.step() for _ in range(2 * FIRST + 1)]
    assert not any("install" in step for step in asked[:-1]) and asked[-1] == ["install", "self_test", "drafts"]


def test_law_2_an_engine_that_was_found_to_sample_wrongly_is_not_tried_again():
    run = Run(on_self_test_failure="plain")
    run.engines.report = SelfTestReport((Check("greedy", False, "1 wrong"),), 1.0)
    run.step()
    run.engines.report = SelfTestReport((), 1.0)
    assert not any("self_test" in run.step() for _ in range(100)) and run.session.failed


def test_a_self_test_that_only_ran_out_of_time_is():
    run = Run(on_self_test_failure="plain")
    run.engines.report = SelfTestReport((Check("greedy", False, "late", out_of_time=True),), 1.0)
    run.step()
    assert "nothing was found wrong" in run.session.failure and "spec.self_test_seconds=30" in run.session.failure
    run.engines.report = SelfTestReport((), 1.0)
    steps = [run.step() for _ in range(3)]
    assert "drafts" in steps[1] and run.engines.seconds == [30.0, 60.0], "a plain rollout, then twice the time"


def test_a_self_test_says_when_it_begins_and_what_is_unproven_with_the_option(caplog):
    """Once: silence for its 84 seconds, and a warning that named no option."""
    caplog.set_level(logging.INFO, logger="spec_plugin")
    run = Run(self_test_seconds=40)
    run.engines.report = SelfTestReport((Check("samples", True, "unproven: too few", unproven=True),), 1.0)
    run.step()
    said = [r.getMessage() for r in caplog.records if "self-test" in r.getMessage()]
    assert "the self-test begins, no rollout until it ends: 40 s (spec.self_test_seconds)" in said[0]
    assert "the self-test passed in 1.0 s" in said[1]
    assert "samples is unproven: too few. More seconds may prove it (spec.self_test_seconds=40)" in said[2]
    assert not any("a trained draft is about to be served" in line for line in said), "one block, of one test"


def test_a_machine_on_which_every_self_test_runs_out_of_time_is_not_asked_again_and_again():
    run = Run(on_self_test_failure="plain")
    run.engines.report = SelfTestReport((Check("greedy", False, "late", out_of_time=True),), 1.0)
    steps = ["self_test" in run.step() for _ in range(60)]
    assert [i for i, tested in enumerate(steps) if tested] == [0, 2, 19, 52]
    assert run.engines.seconds == [30.0, 60.0, 120.0, 120.0]


def test_law_2_a_fresh_start_on_an_engine_that_samples_wrongly_stops_the_run():
    run = Run()
    run.engines.broken = "install"
    run.step()
    run.engines.broken = ""
    run.engines.report = SelfTestReport((Check("greedy", False, "1 wrong"),), 1.0)
    with pytest.raises(LosslessError, match="1 wrong"):
        for _ in range(20):
            run.step()


def test_recoveries_are_counted_from_the_first_failure_on():
    recovery = Recovery(2)
    assert not recovery.synced() and recovery.left is None
    for wait in (FIRST, 2 * FIRST):
        recovery.failed(for_good=False)
        assert [recovery.synced() for _ in range(wait + 3)].index(True) == wait - 1
    recovery.failed(for_good=False)
    assert recovery.left is None and not any(recovery.synced() for _ in range(1000))


class BreaksOn:
    """A plugin that raises in ``spec_train_draft`` on one rank at one step."""

    def __init__(self, rank: int, at: int) -> None:
        self._mine, self._at = torch.distributed.get_rank() == rank, at

    @hookimpl
    def spec_train_draft(self, step: int) -> None:
        if self._mine and step == self._at:
            raise RuntimeError("planted")


@pytest.mark.parametrize("where", [0, 1])
def test_all_ranks_begin_anew_together_with_the_draft_of_the_first(tmp_path, where):
    from dataclasses import replace

    def work(rank: int) -> list[Any]:
        target = replace(TARGET, actor_group=torch.distributed.group.WORLD)
        session = SpecSession(SpecConfig(train_max_steps=2), target)
        session.manager.register(BreaksOn(where, at=2))
        control = run_of(session, None)
        failed, versions, parted = [], [], False
        for version in range(FIRST + 6):
            synced(control, sync(version))
            control.agree()
            (trainer,) = [p for p in session.manager.get_plugins() if type(p).__name__ == "DraftTraining"]
            if session.failed and not parted and rank == 1:
                parted = True  # one rank went on for a moment longer
                with torch.no_grad():
                    next(iter(trainer._trainer.draft.parameters())).add_(1.0)
                trainer._trainer.draft_version += 1
            session.target_forward(hidden(torch.arange(20) + 20 * rank, version))
            session.ledger.plain_s = 60.0 * (rank == 0)  # only the rank with the link knows
            trained(control, version)
            failed.append(session.failed)
            versions.append(trainer._trainer.draft_version)
        refresh = session.weight_sync(sync(99))
        assert refresh is not None
        return [failed, versions[-1], versions[-1] > versions[3], refresh.digest]

    first, second = on_two_ranks(tmp_path, work)
    assert first == second, "alike on both ranks, the draft among it"
    failed, _, has_trained, _ = first
    assert failed == [False, False] + [True] * FIRST + [False] * 4 and has_trained
