"""The report's first line: what the flag has saved, of all logged steps together."""

from __future__ import annotations

import json

import pytest
from builders.report import made

from spec_plugin.api.speculation import Reason, Speculation
from spec_plugin.commands.report.build import Report, to_json, to_text
from spec_plugin.commands.report.findings import findings_of
from spec_plugin.commands.report.run import Earned, LoggedRun, duration


def report_of(run: LoggedRun) -> Report:
    return Report((run,), None, (), (), ())


def test_what_all_steps_have_saved_stands_in_the_first_line_and_in_the_json():
    run = made(
        60, step_s=600.0, spec_saved_so_far_s=lambda s: 240.0 * max(0, s - 10), spec_cost_so_far_s=lambda s: 30.0 * s
    )
    report = report_of(run)
    assert next(to_text(report)) == (
        "made: 60 steps of verl, saved 2 h 50 min of 12 h 50 min (3 h 20 min of generation, for 30 min of work for it)"
    )
    (found,) = json.loads(to_json(report))["runs"]
    assert found["earned"] == {"saved_s": 12_000.0, "cost_s": 1800.0, "net_s": 10_200.0, "run_s": 36_000.0}


def test_a_run_that_has_lost_by_it_says_so():
    assert (
        Earned(20.0, 95.0, 3600.0).sentence
        == "cost 1 min 15 s of 1 h (saved 20.0 s of generation, for 1 min 35 s of work for it)"
    )
    assert (
        Earned(-5.0, 1.0, 30.0).sentence
        == "cost 6.0 s of 30.0 s (saved -5.0 s of generation, for 1.0 s of work for it)"
    )


def test_a_run_that_was_resumed_began_to_count_anew():
    saved, cost = [5.0, 9.0, 14.0, 2.0, 7.0], [1.0, 2.0, 3.0, 1.5, 2.5]
    steps = {
        i: {"step_s": 5.0, "spec/saved_so_far_s": s, "spec/cost_so_far_s": c}
        for i, (s, c) in enumerate(zip(saved, cost, strict=True), 1)
    }
    assert LoggedRun("run", "verl", steps).earned == Earned(14.0 + 7.0, 3.0 + 2.5, 25.0)


def test_it_is_said_from_which_step_on_drafting_had_paid_for_all_until_then():
    run = made(9, spec_saved_so_far_s=lambda s: 4.0 * s, spec_cost_so_far_s=lambda s: 10.0 + s)
    assert "from step 4 on drafting had saved, in all, at least what it had cost" in [f.text for f in findings_of(run)]
    lost = made(9, spec_saved_so_far_s=lambda s: 9.0 * (s < 5), spec_cost_so_far_s=5.0)
    assert not [f for f in findings_of(lost) if "had saved, in all" in f.text]


def test_a_run_that_did_not_log_it_has_no_such_line():
    assert made(3).earned is None
    assert LoggedRun("run", "verl", {1: {"spec/cost_so_far_s": 1.0}}).earned is None, (
        "nor one without the time of its steps"
    )
    report = report_of(made(3))
    assert next(to_text(report)) == "made: 3 steps of verl"
    assert json.loads(to_json(report))["runs"][0]["earned"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min"),
        (250.0, "4 min 10 s"),
        (3599.7, "1 h"),
        (11_520.0, "3 h 12 min"),
        (-7.0, "-7.0 s"),
    ],
)
def test_times_for_people(seconds, text):
    assert duration(seconds) == text


def test_the_self_test_is_named_as_what_nearly_all_of_the_cost_was() -> None:
    """Once it was "self-tests and the rest", last of four."""
    run = made(
        9,
        step_s=5.0,
        spec_cost_so_far_s=lambda s: 60.0 + 0.2 * s + (3.0 if s >= 4 else 0.0),
        spec_train_ms=lambda s: 100.0 + s,
    )
    assert run.self_tests.keys() == {1, 4} and run.self_tests[1] == pytest.approx(60.1, abs=0.05)
    (found,) = [f for f in findings_of(run) if "own work took" in f.text]
    assert ": self-tests (steps 1, 4) 1 min 3 s, draft training 0.9 s, the rest" in found.text


def test_steps_without_drafts_behind_a_resume_are_named_with_the_reason() -> None:
    cost = [60.0, 61.0, 62.0, 63.0, 40.0, 41.0, 42.0]
    length = [1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 2.5]
    state = [
        Speculation.UNTRIED,
        *[Speculation.SERVING] * 3,
        Speculation.UNTRIED,
        Speculation.UNTRIED,
        Speculation.SERVING,
    ]
    steps = {
        i: {
            "spec/cost_so_far_s": c,
            "spec/acceptance_length": a,
            "spec/state": float(s),
            "spec/reason": float(Reason.NO_DRAFT_YET),
        }
        for i, (c, a, s) in enumerate(zip(cost, length, state, strict=True), 1)
    }
    run = LoggedRun("run", "verl", steps)
    assert run.resumed == (5,)
    (found,) = [f for f in findings_of(run) if "resumed" in f.text]
    assert (
        found.text == f"the run was resumed at step 5, and did not draft at steps 5, 6: {Reason.NO_DRAFT_YET.meaning}"
    )
    drafting = LoggedRun("run", "verl", {i: {**step, "spec/acceptance_length": 2.0} for i, step in steps.items()})
    assert not [f for f in findings_of(drafting) if "resumed" in f.text]
