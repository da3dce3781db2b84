from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from builders.batches import batch_of, stated_of
from builders.session import TARGET, step
from spec_plugin_conformance import faults, judge, reported
from spec_plugin_conformance.faults import SHORT, STEPS, TOUR, FaultTour, read_tour
from spec_plugin_conformance.forward import read_pack
from spec_plugin_conformance.journal import read_trace
from spec_plugin_conformance.plants import LOGPROB, NAN, PERTURBED, PLANTED, VERSION, PlantedErrors
from spec_plugin_conformance.recorder import Recorder, mutants

from spec_plugin import LogprobProvenanceError, SpecConfig
from spec_plugin.api.events import (
    EngineState,
    HiddenStates,
    LogprobBatch,
    RefreshReport,
    RolloutStats,
    SelfTestReport,
    StatedLogprobs,
    WeightSync,
)
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.api.rollouts import Rollout
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession


def session_of(*plugins: str) -> SpecSession:
    config = SpecConfig.parse({"serve": "always", "train_tokens": 32, "audit": True, "plugins": plugins})
    return SpecSession(config, TARGET, create_manager((), config.plugins, load_entry_points=False))


def recorder(folder) -> str:
    return f"spec_plugin_conformance.recorder:Recorder={folder}"


def test_every_hook_of_a_session_is_recorded_and_nothing_fails(tmp_path):
    session = session_of(recorder(tmp_path / "r"))
    session.method.speculative_config()
    step(session, 0, tmp_path / "a")
    assert not session.failed, session.failure
    session.check_stated(stated())
    session.recover()
    trace = read_trace(tmp_path / "r")
    from spec_plugin.api import hookspecs

    hooks = {e["hook"] for e in trace if e["hook"].startswith("spec_")}
    asked = {"spec_can_pay", "spec_head_start", "spec_slowdown_without_drafts"}
    assert hooks == {n for n in vars(hookspecs) if n.startswith("spec_")} - asked, "no adapter has a part in these"
    assert [e["published"] is not None for e in trace if e["hook"] == "spec_draft_weights"] == [True]
    for check in judge.events_of(trace, "spec_check_logprobs"):
        assert not check["caught"]["unchanged"]


class Remembers:
    """A method, and its memory."""

    @hookimpl
    def spec_method(self) -> Method:
        return Method("suffix", {}, memory=self)

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        self.kept = [*rollouts]

    def recall(self) -> list[Rollout]:
        return self.kept


def test_what_is_no_hook_is_recorded_too(tmp_path):
    config = SpecConfig.parse({"method": "suffix", "audit": True, "plugins": [recorder(tmp_path)]})
    manager = create_manager(("suffix",), config.plugins, load_entry_points=False)
    manager.register(Remembers())
    session = SpecSession(config, TARGET, manager)
    assert session.method.memory is not None
    session.method.memory.keep([Rollout(b"", b"\0\0\0\0")])
    assert session.method.memory.recall() == [Rollout(b"", b"\0\0\0\0")]
    audit(session, 7)
    *_, kept, recalled, audited = read_trace(tmp_path)
    assert (kept["hook"], kept["rollouts"]) == ("memory_keep", 1)
    assert (recalled["hook"], recalled["rollouts"]) == ("memory_recall", 1)
    assert (audited["hook"], audited["policy_version"]) == ("audit", 7) and not session.failed


def test_packs_come_back_as_they_were(tmp_path):
    plugin = Recorder(str(tmp_path))
    ids = torch.arange(5)
    mask = ids > 2
    plugin.spec_target_forward(HiddenStates(ids, torch.randn(5, 12), torch.randn(5, 4).bfloat16(), mask, (3, 2), 4))
    (file,) = tmp_path.glob("*.safetensors")
    pack = read_pack(file)
    assert (pack.lengths, pack.policy_version, pack.last.dtype) == ((3, 2), 4, torch.bfloat16)
    found = pack.masks([])
    assert found["policy_version"] == 4 and found["masks"] == [[False] * 3, [True] * 2]
    assert list(map(len, found["documents"])) == [3, 2]


def batch(version: int = 3, engine: PlantedErrors | None = None) -> LogprobBatch:
    found = -torch.rand(2, 4)
    rollout, sampled_by = found.clone(), version
    if engine is not None and engine.planted(LOGPROB):
        rollout[:, 0] = PERTURBED
    if engine is not None and engine.planted(VERSION):
        sampled_by -= 1
    if engine is not None and engine.planted(NAN):
        rollout[:, 0] = torch.nan
    return batch_of(version, found, rollout, sampled_by=sampled_by)


def stated(version: int = 3, engine: PlantedErrors | None = None) -> StatedLogprobs:
    return stated_of(batch(version, engine))


@pytest.mark.parametrize("version", [0, 3])
def test_a_guard_catches_every_mutant_and_not_the_batch_itself(tmp_path, version):
    session = session_of(recorder(tmp_path))
    session.check_logprobs(batch(version))
    (event,) = [e for e in read_trace(tmp_path) if e["hook"] == "spec_check_logprobs"]
    assert event["caught"].pop("unchanged") is False
    assert event["caught"] == dict.fromkeys(set(mutants(batch(), 64)) - {"unchanged"}, True)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"hook": "a", "time": 1, "event": 0}\n{"hook": "b", "ti')
    assert [e["hook"] for e in read_trace(tmp_path)] == ["a"]


def audit(session: SpecSession, version: int) -> None:
    """As the control has it."""
    with session.guarded(Reason.OTHER_TROUBLE, "audit"):
        for auditor in session.auditors:
            auditor(EngineState("synced", version, 0, "", ""))


def drive(
    session: SpecSession,
    steps: int,
    drafts_when_failed: bool = False,
    engine: PlantedErrors | None = None,
    bypassed: bool = False,
) -> None:
    """Steps as an adapter drives them; the engine drafts as the table says, and says wrong what is planted."""
    k = (0,)
    for version in range(steps):
        audit(session, version)
        weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(version))
        refresh = session.weight_sync(WeightSync(version, weights, weights))
        if refresh is not None:
            report = RefreshReport(True, refresh.draft_version, refresh.digest, 1.0)
            with session.guarded(Reason.REFRESH):
                session.manager.hook.spec_refreshed(refresh=refresh, report=report)
        if version == 0:
            session.engine_ready(SelfTestReport((), 1.0))
        schedule = session.schedule(version)
        k = schedule.table if schedule else k
        session.rollout_start(version)
        on = any(k) or drafts_when_failed
        session.rollout_end(RolloutStats(version, 2, 10, 1.0, 9 * on, 27 * on, 9 * on, (9, 0, 0) if on else ()))
        ids = torch.arange(8)
        session.target_forward(HiddenStates(ids, torch.randn(8, 96), torch.randn(8, 32), ids > 3, (8,), version))
        if bypassed:
            session.check_stated(stated(version, engine))
        session.check_logprobs(batch(version, engine))
        session.head_start()
        session.train_draft(version, 0.0)
        session.metrics()


@pytest.mark.parametrize("bypassed", [False, True])
def test_the_tour_breaks_and_heals_every_hook_and_then_stops_the_run(tmp_path, bypassed):
    """Its end is the guard's own refusal of a NaN, which the session insists on."""
    session = session_of(f"spec_plugin_conformance.faults:FaultTour={tmp_path}")
    with pytest.raises(LogprobProvenanceError, match=r"rollout log-probs are not finite.*=nan"):
        drive(session, STEPS, engine=PlantedErrors(tmp_path), bypassed=bypassed)
    story = read_tour(tmp_path)
    assert [e["hook"] for e in story if e["event"] == "broken"] == list(TOUR)
    assert judge.faults(story) == []
    assert reported.planted_errors_refused(story, asynchronous=False) == []
    assert not any(PlantedErrors(tmp_path).planted(what) for what in (LOGPROB, VERSION))
    assert judge.stopped(story, "LogprobProvenanceError: not finite", []) == []


def test_what_was_in_a_queue_when_it_was_refused_is_forgiven_where_phases_overlap(tmp_path):
    """Half of a batch is of the phase before: its first mini-batch is refused, the next one is right, and the next step not."""
    plants = PlantedErrors(tmp_path)
    session = session_of(f"spec_plugin_conformance.faults:ShortTour={tmp_path}")
    check, before = session.check_logprobs, [batch(0)]

    def mini_batches(now: LogprobBatch) -> None:
        check(replace(now, lag_allowed=True))
        check(replace(batch(now.policy_version), lag_allowed=True))
        check(replace(before[0], policy_version=now.policy_version, lag_allowed=True))
        before[0] = now

    session.check_logprobs = mini_batches  # type: ignore[method-assign, assignment]
    with pytest.raises(LogprobProvenanceError, match="=nan"):
        drive(session, 2 * SHORT, engine=plants)
    story = read_tour(tmp_path)
    assert reported.planted_errors_refused(story, asynchronous=True) == []
    assert [e["what"] for e in story if e["event"] == "refused"] == [LOGPROB, NAN]


def test_what_cleans_a_nan_before_the_guard_sees_it_is_seen(tmp_path, monkeypatch):
    honest = batch

    def cleaned(version: int = 3, engine: PlantedErrors | None = None) -> LogprobBatch:
        found = honest(version, engine)
        assert found.rollout is not None
        return replace(found, rollout=found.rollout.nan_to_num(0.0))

    monkeypatch.setitem(globals(), "batch", cleaned)
    session = session_of(f"spec_plugin_conformance.faults:ShortTour={tmp_path}")
    with pytest.raises(LogprobProvenanceError, match=PLANTED):
        drive(session, SHORT, engine=PlantedErrors(tmp_path))
    (problem,) = reported.planted_errors_refused(read_tour(tmp_path), asynchronous=False)
    assert problem == "a NaN was planted in each of the engine's responses, and no guard has seen it"


def test_what_the_engine_says_wrong_is_missed_by_an_adapter_that_says_something_else(tmp_path):
    session = session_of(f"spec_plugin_conformance.faults:ShortTour={tmp_path}")
    with pytest.raises(LogprobProvenanceError, match=PLANTED):
        drive(session, SHORT)
    story = read_tour(tmp_path)
    assert [e["hook"] for e in story if e["event"] == "broken"] == ["spec_rollout_end"]
    assert len(reported.planted_errors_refused(story, asynchronous=False)) == 3


def test_an_engine_that_is_compared_with_itself_is_no_guard(tmp_path, monkeypatch):
    """What it says wrong is refused by its sign alone, on whichever side it is shown."""
    honest = batch

    def twice(version: int = 3, engine: PlantedErrors | None = None) -> LogprobBatch:
        found = honest(version, engine)
        assert found.rollout is not None
        return replace(found, recomputed=found.rollout.clone())

    monkeypatch.setitem(globals(), "batch", twice)
    session = session_of(f"spec_plugin_conformance.faults:ShortTour={tmp_path}")
    with pytest.raises(LogprobProvenanceError, match="not finite"):
        drive(session, SHORT, engine=PlantedErrors(tmp_path))
    (problem, _) = reported.planted_errors_refused(read_tour(tmp_path), asynchronous=False)
    assert "wrong log-prob planted in the engine reached the guard as the actor's" in problem


def test_a_violation_that_was_not_planted_stops_the_run_at_once(tmp_path):
    session = session_of(f"spec_plugin_conformance.faults:ShortTour={tmp_path}")
    with pytest.raises(LogprobProvenanceError, match="not sampled by policy version 3"):
        session.check_logprobs(batch_of(3, -torch.rand(2, 4), None, sampled_by=2))


def test_another_rank_leaves_to_the_first_one_what_that_has_planted(tmp_path, monkeypatch):
    session = session_of(f"spec_plugin_conformance.faults:ShortTour={tmp_path}")
    wrong = batch_of(3, -torch.rand(2, 4), None, sampled_by=2)
    monkeypatch.setattr(faults, "is_first", lambda: False)
    with pytest.raises(LogprobProvenanceError):
        session.check_logprobs(wrong)
    plants = PlantedErrors(tmp_path)
    plants.plant(VERSION)
    plants.remove(VERSION)  # the first rank was faster
    session.check_logprobs(wrong)
    monkeypatch.setattr(faults, "is_first", lambda: True)
    with pytest.raises(LogprobProvenanceError):
        session.check_logprobs(wrong)


def test_an_engine_that_drafts_on_after_a_fault_is_seen(tmp_path):
    session = session_of(f"spec_plugin_conformance.faults:FaultTour={tmp_path}")
    with pytest.raises(LogprobProvenanceError):
        drive(session, STEPS, drafts_when_failed=True)
    assert any("verification steps" in p for p in judge.faults(read_tour(tmp_path)))


def test_saving_breaks_when_a_checkpoint_comes(tmp_path):
    session = session_of(f"spec_plugin_conformance.faults:FaultTour={tmp_path}")
    tour = next(p for p in session.manager.get_plugins() if isinstance(p, FaultTour))
    tour.spec_rollout_end(stats=RolloutStats(0, 2, 10, 1.0, 9))
    session.save(tmp_path / "checkpoint")
    assert session.failure is None
    assert [e["hook"] for e in read_tour(tmp_path) if e["event"] == "broken"] == ["spec_save"]


def test_a_method_without_a_draft_is_not_asked_for_what_it_never_fires(tmp_path):
    tour = FaultTour(str(tmp_path))
    tour.spec_configure(method=Method("looked up", {}, pretrained=True))
    (begins,) = read_tour(tmp_path)
    assert set(TOUR) - set(begins["stops"]) == {"spec_refreshed", "spec_target_forward"}
    assert "spec_weight_sync was never reached, so no fault in it was tested" in judge.faults([begins])
    assert not any("spec_refreshed" in problem for problem in judge.faults([begins]))
