from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from builders.batches import batch_of
from builders.session import SEQS, H, V, raising, session_with, step

from spec_plugin import (
    LogprobProvenanceError,
    LosslessError,
    SpecConfigError,
    hookimpl,
)
from spec_plugin.api.errors import PatchError
from spec_plugin.api.events import (
    Drafts,
    RolloutStats,
    WeightSync,
)
from spec_plugin.api.method import Method
from spec_plugin.api.speculation import Reason
from spec_plugin.trainer.links import merge_stats

GUARDED = (
    "spec_engine_ready",
    "spec_rollout_start",
    "spec_rollout_end",
    "spec_target_forward",
    "spec_train_draft",
    "spec_weight_sync",
    "spec_draft_weights",
    "spec_refreshed",
    "spec_schedule",
    "spec_metrics",
    "spec_save",
    "spec_load",
)
#: of these no draft depends on
NOTED = ("spec_metrics", "spec_save")


@pytest.fixture
def warnings_of(caplog):
    caplog.set_level(logging.WARNING, logger="spec_plugin")
    return lambda: [r.getMessage() for r in caplog.records if "speculation is off" in r.getMessage()]


def test_a_healthy_run_reports_no_failure_and_no_warning(tmp_path, warnings_of):
    session = session_with(train_tokens=32)
    (tmp_path / "draft").mkdir()  # so that spec_load looks at it before a draft exists
    (tmp_path / "draft").rmdir()
    metrics = step(session, 0, tmp_path / "a") | step(session, 1, tmp_path / "b")
    assert metrics["spec/failed"] == 0.0 and warnings_of() == [], session.failure
    assert metrics["spec/acceptance_length"] == 3.0


@pytest.mark.parametrize("hook", [hook for hook in GUARDED if hook not in NOTED])
def test_law_6_an_exception_in_any_hook_turns_speculation_off_with_one_warning(hook, tmp_path, warnings_of):
    session = session_with(raising(hook, RuntimeError("out of luck")), serve="always")
    for version in range(3):
        metrics = step(session, version, tmp_path)
    assert session.failed
    assert len(warnings_of()) == 1 and "out of luck" in warnings_of()[0] and "training goes on" in warnings_of()[0]
    assert metrics["spec/failed"] == 1.0
    assert session.schedule(3).table == (0,) * (SEQS + 1)
    assert session.weight_sync(WeightSync(3, torch.zeros(V, H), torch.zeros(V, H))) is None


@pytest.mark.parametrize("hook", NOTED)
def test_law_6_bookkeeping_that_fails_costs_a_warning_and_no_draft(hook, tmp_path, caplog):
    """A full disk at one save is no reason for eight plain syncs; and the other plugins are saved all the same."""
    saved: list[Path] = []

    class After:
        @hookimpl(trylast=True)
        def spec_save(self, path):
            saved.append(path)

    session = session_with(raising(hook, OSError("no space left")), serve="always")
    session.manager.register(After())
    metrics = [step(session, version, tmp_path / str(version)) for version in range(3)]
    assert not session.failed and any(session.schedule(3).table)
    assert len(saved) == 3 and metrics[-1]["spec/failed"] == 0.0 and "spec/acceptance_length" in metrics[-1]
    said = [r.getMessage() for r in caplog.records if "no space left. Drafts go on" in r.getMessage()]
    assert len(said) == (3 if hook == "spec_save" else 1), "each checkpoint that is lost; of metrics one line"


class Odd(dict):
    """Metrics that cannot be read."""

    def items(self):
        raise LookupError("no items")


def test_law_6_metrics_that_cannot_be_read_cost_a_warning_also_of_a_wrapper(tmp_path, caplog):
    class Mine:
        @hookimpl(wrapper=True)
        def spec_metrics(self):
            return [*(yield), Odd()]

    for plugin in (type("Plain", (), {"spec_metrics": hookimpl(lambda self: Odd())})(), Mine()):
        session = session_with(plugin)
        assert step(session, 0, tmp_path)["spec/acceptance_length"] == 3.0 and not session.failed
    assert len([r for r in caplog.records if "no items. Drafts go on" in r.getMessage()]) == 2


def test_law_6_nothing_is_trained_saved_or_harvested_after_a_failure(tmp_path):
    calls: list[str] = []

    class Watching:
        @hookimpl
        def spec_target_forward(self):
            calls.append("harvest")

        @hookimpl
        def spec_train_draft(self):
            calls.append("train")

        @hookimpl
        def spec_save(self):
            calls.append("save")

    session = session_with(Watching())
    session.fail(Reason.HARVEST, "on purpose")
    step(session, 0, tmp_path)
    assert calls == []


def test_law_6_a_failure_outside_of_the_hooks_counts_too_and_only_the_first_is_kept(warnings_of):
    session = session_with(serve="always")
    assert any(session.schedule(0).table)
    session.fail(Reason.REFRESH, TimeoutError("first"))
    session.fail(Reason.REFRESH, TimeoutError("second"))
    assert session.failure == "refresh: first" and len(warnings_of()) == 1
    assert not any(session.schedule(0).table)


@pytest.mark.parametrize("error", [SpecConfigError, LosslessError, LogprobProvenanceError, PatchError])
@pytest.mark.parametrize("hook", ["spec_weight_sync", "spec_rollout_end", "spec_schedule", "spec_metrics"])
def test_laws_2_and_3_errors_that_must_stop_the_run_pass_through(hook, error, tmp_path, warnings_of):
    session = session_with(raising(hook, error("stop")))
    with pytest.raises(error, match="stop"):
        step(session, 0, tmp_path)
    assert warnings_of() == []


def test_law_3_log_probs_are_checked_also_after_speculation_has_failed():
    session = session_with()
    session.fail(Reason.HARVEST, "on purpose")
    bad = torch.tensor([[float("nan")]])
    with pytest.raises(LogprobProvenanceError):
        session.check_logprobs(batch_of(0, bad, None, drafts=Drafts.OFF))


def test_law_3_a_guard_that_crashes_stops_the_run_since_unchecked_log_probs_must_not_enter_the_loss(tmp_path):
    session = session_with(raising("spec_check_logprobs", ZeroDivisionError("guard")))
    with pytest.raises(ZeroDivisionError):
        step(session, 0, tmp_path)


def test_a_plugin_may_refuse_the_run_when_the_session_starts():
    with pytest.raises(SpecConfigError, match="not this one"):
        session_with(raising("spec_configure", SpecConfigError("not this one")))


def test_a_method_that_no_plugin_provides_is_refused_with_the_active_plugins():
    with pytest.raises(SpecConfigError, match=r"spec.method='eagel3'.*eagle3"):
        session_with(method="eagel3")


def test_a_plugins_method_is_used_like_a_built_in_one():
    class Mine:
        @hookimpl
        def spec_method(self, config):
            return Method("mine", {"method": "suffix"}, lambda: "/there") if config.method == "mine" else None

    method = session_with(Mine(), method="mine").method
    assert method.speculative_config() == {"method": "suffix", "model": "/there"}
    assert method.draft is None and method.harvest is None and not method.newborn


def test_metrics_of_all_plugins_are_merged(tmp_path):
    class Mine:
        @hookimpl
        def spec_metrics(self):
            return {"spec/mine": 7.0}

    metrics = step(session_with(Mine()), 0, tmp_path)
    assert metrics["spec/mine"] == 7.0 and "spec/on" in metrics and "spec/harvest_tokens" in metrics


def test_a_weight_sync_without_an_embedding_turns_speculation_off_and_says_what_was_expected(warnings_of):
    session = session_with()
    assert session.weight_sync(WeightSync(0, None, None)) is None
    assert "whose names end in embed_tokens.weight" in warnings_of()[0]


@pytest.mark.parametrize("draft", ["", "config.json"], ids=["missing folder", "empty folder"])
def test_a_draft_that_cannot_be_read_is_refused_when_the_session_starts(draft, tmp_path):
    folder = tmp_path / "draft"
    if draft:
        folder.mkdir()
    with pytest.raises(SpecConfigError, match=str(folder)):
        session_with(draft=str(folder))


class Told:
    """What a controller tells of a rollout."""

    def __init__(self, slowdown) -> None:
        self.slowdown = slowdown

    @hookimpl
    def spec_slowdown_without_drafts(self, stats):
        return self.slowdown(stats)

    @hookimpl
    def spec_head_start(self):
        return 3.5


def test_a_controller_in_the_place_of_ours_grants_a_head_start():
    session = session_with()
    session.manager.unregister(name="controller")
    assert session.head_start() == 0.0
    session.manager.register(Told(None), name="controller")
    assert session.head_start() == 3.5


def test_the_ledger_hears_what_the_controller_tells_of_a_rollout(monkeypatch):
    session, heard = session_with(), []
    monkeypatch.setattr(session.ledger, "rolled_out", lambda *told: heard.append(told))
    told = Told(lambda stats: 1.5)
    session.manager.unregister(name="controller")
    session.manager.register(told, name="controller")  # a third party's
    stats = RolloutStats(1, 2, 12, 0.5)
    session.rollout_end(stats)
    told.slowdown = lambda stats: -1.0
    session.rollout_end(stats)
    assert heard == [(stats, 1.5), (stats, None)] and not session.failed


def test_of_several_engines_the_slowest_says_what_was_saved(monkeypatch):
    session, heard = session_with(), []
    monkeypatch.setattr(session.ledger, "rolled_out", lambda *told: heard.append(told))
    session.manager.unregister(name="controller")
    session.manager.register(Told(lambda stats: stats.seconds), name="controller")
    parts = tuple(RolloutStats(1, 2, 12, s, busy_seconds=s / 2) for s in (3.0, 7.0))
    stats = merge_stats(parts)
    session.rollout_end(stats)
    assert heard == [(stats, 7.0)]
