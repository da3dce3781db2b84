"""What is told is what is: engines that confirm nothing, values that are none, files that fail, laws that are off."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.law6_faults import TIME_OUT, Drafter, FakeLink, Fault, make, steps
from builders.spec_run import run_of, spans_of, synced
from builders.training import TARGET, sync

from spec_plugin import SpecConfig, hookimpl
from spec_plugin.api.events import DraftRefresh, EngineSchedule, RefreshReport, Schedule
from spec_plugin.api.spans import Span
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession


@pytest.fixture
def said(caplog) -> Callable[[str], list[str]]:
    caplog.set_level(logging.WARNING, logger="spec_plugin")
    return lambda words: [r.getMessage() for r in caplog.records if words in r.getMessage()]


# ---- what is cancelled


def test_the_cancellation_of_the_run_itself_is_no_draft_trouble(tmp_path, said):
    """Ctrl-C cancels what an event loop is at; a run that took it for a broken draft would go on."""
    link = FakeLink(Fault("link.start_phase", TIME_OUT))
    control = make(link.fault, link, refresh_timeout_s=60.0)
    synced(control, sync(0))

    async def ended() -> None:
        beginning = asyncio.create_task(control.rollouts_begin())
        while "start_phase" not in link.calls:
            await asyncio.sleep(0.001)
        beginning.cancel()
        await beginning

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ended())
    assert not control.session.failed and not said("speculation is off")


def test_law_6_an_answer_that_somebody_else_has_cancelled_is_one_that_does_not_come(said):
    class Closing(FakeLink):
        async def start_phase(self, policy_version: int) -> None:
            answer = asyncio.get_running_loop().create_future()
            answer.cancel()
            await answer

    control = make(Fault(), Closing(Fault()))
    synced(control, sync(0))
    asyncio.run(control.rollouts_begin())
    assert control.session.failed and len(said("speculation is off")) == 1


# ---- the state that is told is the state that is


@pytest.mark.parametrize("kind", ["exception", TIME_OUT])
@pytest.mark.parametrize("takes_it_first", [False, True])
def test_law_3_engines_that_do_not_confirm_a_table_are_asked_for_none_and_then_known_to_be_plain(
    kind, takes_it_first, tmp_path, said
):
    link = FakeLink(Fault("link.set_schedule", kind, times=1), takes_it_first)
    control = make(link.fault, link)
    (logged,) = steps(control, tmp_path, 1)
    assert control.session.failed and not any(link.table) and not control.session.speculating
    assert logged["spec/on"] == 0.0 and logged[f"spec/k_b{TARGET.max_num_seqs}"] == 0.0
    assert not said("have not confirmed")


@pytest.mark.parametrize("takes_it_first", [False, True])
def test_law_3_what_engines_sample_that_confirm_nothing_counts_as_drafted_and_that_is_said_once(
    takes_it_first, tmp_path, said
):
    link = FakeLink(Fault("link.set_schedule", "exception", times=4), takes_it_first)
    control = make(link.fault, link)
    walk = steps(control, tmp_path, 5)
    assert [next(walk)["spec/on"] for _ in range(2)] == [1.0, 1.0] and control.session.speculating
    assert len(said("have not confirmed")) == 1
    assert [values["spec/on"] for values in walk] == [1.0, 0.0, 0.0], "asked again before each rollout"
    assert not control.session.speculating and len(said("have not confirmed")) == 1


def test_law_3_engines_that_were_plain_and_took_a_table_without_saying_so_count_as_drafting(tmp_path):
    class Forgetful(FakeLink):
        async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
            known = "set_schedule" not in self.calls
            self.calls.append("set_schedule")
            self.table = schedule.table if known or any(schedule.table) else self.table
            if not known:
                raise ConnectionError("the answer was lost")
            return EngineSchedule(schedule)

    class PlainAtFirst:
        @hookimpl(tryfirst=True)
        def spec_schedule(self, policy_version: int) -> Schedule:
            return Schedule((3 * (policy_version > 0),) * (TARGET.max_num_seqs + 1))

    control = make(Fault(), Forgetful(Fault()))
    control.session.manager.register(PlainAtFirst())
    assert [logged["spec/on"] for logged in steps(control, tmp_path, 2)] == [0.0, 1.0]


@pytest.mark.parametrize("call", ["link.start_phase", "spec_rollout_start"])
def test_trouble_after_k_was_set_takes_the_drafts_back_before_the_rollout(call, tmp_path):
    link = FakeLink(Fault(call, "exception"))
    control = make(link.fault, link)
    next(steps(control, tmp_path, 1))
    assert not any(link.table) and not control.session.speculating


# ---- files


@pytest.mark.parametrize("broken", ["mkdir", "mkstemp", "replace", "torn", "a file in its place"])
def test_law_6_files_that_cannot_be_written_or_read_cost_speculation_only(broken, tmp_path, monkeypatch, said):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "spec_plugin"
    if broken == "torn":
        folder.mkdir()
        (folder / "provenance.json").write_text('{"of": ')
    elif broken == "a file in its place":
        folder.write_text("")
    else:
        monkeypatch.setattr({"mkdir": Path, "mkstemp": tempfile, "replace": os}[broken], broken, full)
    control = make(Fault())
    assert len(list(steps(control, folder))) == 3
    lost = broken == "torn"  # what cannot be read is draft trouble; what cannot be written is a warning
    assert control.session.failed == lost and len(said("speculation is off")) == lost
    assert bool(said("Drafts go on")) == (not lost)


# ---- metrics


class Wrapper:
    def __float__(self) -> float:
        raise LookupError("not yet")


NO_NUMBERS = {
    "None": None,
    "text": "1.5",
    "list": [1.0],
    "huge": 10**400,
    "unprintable": 10**5000,
    "wrapper": Wrapper(),
    "object": object(),
    "NaN": math.nan,
    "infinite": -math.inf,
    "complex": 1j,
    "several": torch.ones(2),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_law_6_a_metric_that_is_no_finite_number_is_left_out_with_one_warning_that_names_it(value, said):
    class Mine:
        @hookimpl
        def spec_metrics(self) -> dict[str, Any]:
            return {"spec/mine": value, "spec/good": 1}

    session = make(Fault()).session
    session.manager.register(Mine(), name="mine")
    for _ in range(3):
        metrics = session.metrics()
    assert "spec/mine" not in metrics and metrics["spec/good"] == 1.0 and not session.failed
    (warning,) = said("is left out of the log")
    assert "plugin mine" in warning and "spec/mine" in warning


@pytest.mark.parametrize("answer", [[("spec/mine", 1.0)], "text", 7, {7: 1.0}], ids=str)
def test_law_6_metrics_that_are_no_mapping_of_names_are_left_out_with_one_warning(answer, said):
    session = make(Fault()).session
    session.manager.register(type("Mine", (), {"spec_metrics": hookimpl(lambda self: answer)})(), name="mine")
    metrics = [session.metrics() for _ in range(3)][-1]
    assert "spec/failed" in metrics and not session.failed and all(isinstance(name, str) for name in metrics)
    assert len(said("plugin mine")) == 1


@pytest.mark.parametrize(
    "value", [1, True, torch.tensor(1.0), torch.ones(1).numpy()[0]], ids=lambda v: type(v).__name__
)
def test_numbers_of_any_kind_are_metrics(value, said):
    session = make(Fault()).session
    session.manager.register(type("Mine", (), {"spec_metrics": hookimpl(lambda self: {"spec/mine": value})})())
    assert session.metrics()["spec/mine"] == 1.0 and type(session.metrics()["spec/mine"]) is float
    assert not said("is left out")


# ---- copies of the policy


def test_law_6_no_memory_for_a_copy_of_the_policy_costs_speculation_only(said):
    class Huge:
        def detach(self) -> Huge:
            return self

        def to(self, *_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    control = make(Fault())
    assert control.session.copy_of(Huge()) is None  # type: ignore[arg-type]
    assert control.session.failed and "2 GiB" in said("speculation is off")[0]
    synced(control, sync())
    assert "install" not in control.link.calls  # type: ignore[union-attr]


def test_a_copy_of_the_policy_is_one_and_has_the_engines_dtype():
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    copy = make(Fault()).session.copy_of(weight)
    assert copy is not None and copy.dtype == torch.float32 and not copy.requires_grad
    with torch.no_grad():
        weight.zero_()
    assert bool((copy == 1).all())


# ---- what must not happen in silence


class Refusing(FakeLink):
    """Serves version 0 for ever."""

    reasons = ("model.norm.weight is not finite in 3 of 64 places", "model.norm.weight is not finite in 9 of 64 places")

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.calls.append("install")
        n = self.calls.count("install")
        return RefreshReport(False, 0, "", 1.0, "torn: missing a" if n > 4 else self.reasons[n % 2])


def test_a_refused_refresh_is_said_once_for_each_reason_and_counted(tmp_path, said):
    control = make(Fault(), Refusing(Fault()), overlaps=False)
    logged = list(steps(control, tmp_path, 6))
    first, second = said("the engines refused")
    assert "not finite in 9 of 64" in first and "go on with version 0" in first and "torn: missing a" in second
    assert logged[-1]["spec/refresh_refused"] == 6.0 and logged[-1]["spec/draft_version"] == 0.0
    assert not control.session.failed


@pytest.mark.parametrize("block", [("eagle3",), ("eagle3", "controller")], ids=["controller", "none"])
def test_law_7_that_nobody_chooses_k_is_said_once_and_its_rollouts_count_as_drafted(block, tmp_path, said):
    manager = create_manager(block=block, load_entry_points=False)
    manager.register(Drafter())
    config = SpecConfig(serve="always", refresh_timeout_s=0.1, self_test_seconds=1.0)
    control = run_of(SpecSession(config, TARGET, manager), FakeLink(Fault()))
    logged = list(steps(control, tmp_path))
    nobody = "controller" in block
    warnings = said("no plugin chooses how much to draft")
    assert len(warnings) == nobody and all("spec.k=8" in w for w in warnings)
    assert control.session.speculating and logged[-1]["spec/on"] == 1.0


UNGUARDED = {
    "blocked": ({"block": ["provenance"]}, "the plugin provenance is blocked"),
    "infinite": ({"logprob_tolerance": math.inf}, "spec.logprob_tolerance=inf"),
    "as good as infinite": ({"logprob_tolerance": 1e6}, "spec.logprob_tolerance=1e+06"),
}


@pytest.mark.parametrize(("options", "why"), UNGUARDED.values(), ids=UNGUARDED)
def test_law_3_is_never_switched_off_in_silence(options, why, said):
    for start in (1, 2):
        config = SpecConfig(**options)
        manager = create_manager(block=config.block, load_entry_points=False)
        control = run_of(SpecSession(config, TARGET, manager), FakeLink(Fault()))
        warnings = said("log-probs enter the loss without a check that they are the policy's")
        assert len(warnings) == start and why in warnings[-1]
        assert control.session.metrics()["spec/provenance"] == 0.0


def test_law_2_is_never_switched_off_in_silence(said):
    make(Fault(), self_test=False)
    assert len(said("spec.self_test=False: the engines are not tested")) == 1


def test_law_3_guarded_runs_say_so(said):
    assert make(Fault(), logprob_tolerance=0.5).session.metrics()["spec/provenance"] == 1.0
    assert not said("without a check") and not said("are not tested")


def test_a_span_that_is_none_stops_nothing():
    control = make(Fault())
    control.link.spans = lambda: asyncio.sleep(0, [Span(None, None, None, None, 0, 0)])  # type: ignore
    control.policy_version = 3
    spans_of(control)
    assert control.session.failed
