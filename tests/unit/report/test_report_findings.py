from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from builders.report import DATA, made

from spec_plugin.api.speculation import Reason, Speculation, as_metrics
from spec_plugin.commands.report.build import compare, make_report
from spec_plugin.commands.report.findings import findings_of
from spec_plugin.commands.report.read import ReportError
from spec_plugin.commands.report.run import LoggedRun, Spread
from spec_plugin.commands.report.states import spans_of


def real(folder: str) -> LoggedRun:
    return make_report([DATA / folder]).runs[0]


def texts(run: LoggedRun, level: str | None = None) -> list[str]:
    return [f.text for f in findings_of(run) if level in (None, f.level)]


def wobble(step: int) -> float:
    """Between -0.1 and 0.1, without a pattern."""
    return random.Random(step).uniform(-0.1, 0.1)


def test_acceptance_that_falls_is_named():
    run = made(spec_acceptance_length=lambda s: (5.0 if s < 41 else 3.2) + wobble(s))
    (text,) = texts(run, "warn")
    assert re.sub(r"\.\d+", "", text) == (
        "acceptance fell: 5 tokens per forward pass in the best fifth of the drafted steps, 3 in the last"
    )


def test_acceptance_that_wobbles_or_rises_is_no_warning():
    run = made(spec_acceptance_length=lambda s: 2.0 + s / 20 + 5 * wobble(s), lr=lambda s: 1e-6 * (1 + (s > 20)))
    assert texts(run, "warn") == []


def test_steps_that_did_not_draft_are_no_fall_of_acceptance():
    run = made(spec_acceptance_length=lambda s: 1.0 if 20 <= s < 30 else 5.0)
    assert not [t for t in texts(run) if "fell" in t]


def test_why_a_run_did_not_speculate_is_read_from_its_metrics():
    first, second = spans_of(real("verl-flag"))
    assert (first.where, first.state, first.why) == (
        "step 1",
        "off",
        "no draft had been trained, and none measured yet",
    )
    assert (second.where, second.state, second.reason) == ("steps 2 to 8", "on", "PREDICTED_TO_PAY")


def coded(count: int, code: Callable[[int], dict[str, float]], **columns: object) -> LoggedRun:
    """A run that logs ``spec/state`` and ``spec/reason``, by step."""
    run = made(count, **columns)
    steps = {step: {**values, **code(step)} for step, values in run.steps.items()}
    return LoggedRun(run.name, run.trainer, steps)


@pytest.mark.parametrize("reason", list(Reason))
def test_why_a_run_did_or_did_not_speculate_is_what_it_logged(reason):
    (span,) = spans_of(coded(3, lambda s: as_metrics(reason)))
    assert span.reason == reason.name and (span.first, span.last) == (1, 3)
    assert span.why == reason.meaning
    assert span.state == ("on" if reason < 10 else "failed" if 20 <= reason < 30 else "off")


def test_numbers_stand_beside_the_reason_that_drafts_do_not_pay():
    run = coded(3, lambda s: as_metrics(Reason.BELOW_BREAK_EVEN), spec_expected_acceptance=1.4, spec_break_even_b8=2.0)
    assert (
        spans_of(run)[-1].why
        == "drafts make too few tokens to pay (tokens per forward pass: 1.40 predicted by training, 2.00 needed at batch size 8)"
    )


def test_trouble_is_found_by_its_code():
    def code(step: int) -> dict[str, float]:
        if step < 3:
            return as_metrics(Reason.PREDICTED_TO_PAY)
        return as_metrics(Reason.HARVEST, Speculation.GIVEN_UP if step > 4 else None)

    run = coded(6, code)
    assert [span.where for span in spans_of(run)] == ["steps 1 to 2", "steps 3 to 4", "steps 5 to 6"]
    assert texts(run, "bad") == [
        "steps 3 to 4: drafting had failed and was off: trouble in the harvest of hidden states",
        "steps 5 to 6: drafting had failed and was off: trouble in the harvest of hidden states; it is not tried again "
        "in this run",
    ]


def test_that_the_user_wants_no_drafts_is_no_warning():
    run = coded(3, lambda s: as_metrics(Reason.SERVE_NEVER), spec_on=0, spec_acceptance_length=1.0)
    assert "nothing was drafted; at the end: serve=never" in texts(run, "fine") and texts(run, "warn") == []


def test_codes_of_a_later_version_are_no_error():
    (span,) = spans_of(coded(2, lambda s: {"spec/state": 99.0, "spec/reason": 98.0}))
    assert (span.state, span.reason) == ("off", None) and "98" in span.why


def test_a_dropped_draft_says_what_it_made_and_would_have_had_to():
    code = as_metrics(Reason.BELOW_BREAK_EVEN, Speculation.DROPPED)
    run = coded(2, lambda s: code, spec_on=0, spec_tokens_per_forward=1.2, spec_break_even_b4=1.9)
    assert (
        spans_of(run)[0].why
        == "drafts make too few tokens to pay (tokens per forward pass: 1.20 measured, 1.90 needed at batch size 4)"
    )


def test_a_draft_that_was_tried_and_lost_is_the_reason_for_the_steps_after_it():
    tried = coded(
        4,
        lambda s: as_metrics(Reason.A_TRY if s == 1 else Reason.BELOW_BREAK_EVEN),
        spec_acceptance_length=lambda s: 1.39 if s == 1 else 1.0,
        spec_tokens_per_forward=lambda s: 1.08 if s == 1 else 1.0,
        spec_break_even_b8=1.8,
    )
    _, after = spans_of(tried)
    assert (after.where, after.why) == (
        "steps 2 to 4",
        "drafts make too few tokens to pay (tokens per forward pass: 1.08 measured, 1.80 needed at batch size 8)",
    )


def test_a_try_that_promised_nothing_is_no_broken_promise():
    run = made(
        2,
        spec_speedup_predicted=lambda s: 1.0 if s == 1 else 2.0,
        spec_speedup_realised=lambda s: 0.9 if s == 1 else 2.0 + s / 1000,
    )
    assert any("; 1.00 of the prediction" in text for text in texts(run, "fine"))
    assert "drafting was slower than plain decoding at step 1, of 2" in texts(run, "warn")


def test_a_plain_run_is_said_to_be_one():
    assert texts(real("verl-plain")) == ["a plain run: no spec/* metric was logged, so the flag was off"]


def test_an_asynchronous_runs_prediction_which_is_for_a_later_rollout_is_not_compared():
    assert any("of the prediction" in text for text in texts(real("verl-flag")))
    asynchronous = real("verl-lag1")
    assert asynchronous.series("spec/speedup_predicted") and asynchronous.series("spec/speedup_realised")
    assert not [text for text in texts(asynchronous) if "of the prediction" in text]


def test_drafting_that_loses_is_named_by_its_steps():
    run = made(9, spec_speedup_predicted=2.0, spec_speedup_realised=lambda s: s / 1000 + (0.8 if s in (4, 7) else 1.1))
    assert "drafting was slower than plain decoding at steps 4, 7, of 9" in texts(run, "warn")
    assert any("0.55 of the prediction" in text for text in texts(run, "warn"))


def test_a_few_steps_a_little_slower_are_told_without_a_warning():
    few = made(40, spec_speedup_realised=lambda s: s / 1000 + (0.9 if s in (4, 7) else 1.3))
    assert texts(few, "warn") == []
    assert "drafting was slower than plain decoding at steps 4, 7, of 40" in texts(few, "fine")


def test_a_speed_that_is_logged_again_is_not_counted_again():
    run = made(6, spec_speedup_realised=lambda s: 0.5 if s >= 2 else 0.9)
    assert "drafting was slower than plain decoding at steps 1, 2, of 2" in texts(run, "warn")


def test_log_probs_above_their_tolerance_are_named_unless_the_policy_had_moved():
    over = made(5, spec_logprob_diff_mean=lambda s: 0.1 if s == 3 else 1e-4, spec_logprob_tolerance=0.01)
    assert texts(over, "warn") == ["the mean log-prob difference exceeded the tolerance at step 3"]
    assert not [t for t in texts(real("verl-lag1"), "warn") if "log-prob" in t]


def test_a_draft_of_which_nothing_was_accepted_is_named():
    run = coded(3, lambda s: as_metrics(Reason.ASKED_FOR), spec_acceptance_length=1.0)
    assert texts(run, "warn") == ["the engines drafted, but no drafted token was ever accepted"]


def test_a_run_that_never_drafted_ends_with_the_reason():
    code = as_metrics(Reason.BELOW_BREAK_EVEN)
    run = coded(3, lambda s: code, spec_expected_acceptance=1.4, spec_break_even_b8=2.0, spec_acceptance_length=1.0)
    assert texts(run, "warn") == [
        "nothing was drafted; at the end: drafts make too few tokens to pay (tokens per forward pass: 1.40 predicted by "
        "training, 2.00 needed at batch size 8)"
    ]


def test_a_run_whose_log_probs_are_not_compared_is_wrong():
    assert texts(made(3, spec_provenance=lambda s: s != 2), "bad") == [
        "the engine's log-probs were not compared with the policy's at step 2"
    ]


def test_refused_refreshes_and_a_draft_that_stands_still_are_named():
    run = made(
        8,
        spec_refresh_refused=lambda s: (s >= 5) * 2,
        spec_draft_version=lambda s: min(s, 3),
        spec_train_ms=lambda s: 400 + s,
        spec_train_steps=5,
    )
    assert texts(run, "warn") == [
        "the draft was trained at steps 4, 5, 6, 7, 8, but the engine kept serving one version",
        "refreshes that the engine refused: 2, the first at step 5; it kept the draft before",
    ]


def test_what_is_only_repeated_is_not_counted_as_work():
    run = made(4, spec_train_ms=lambda s: 1000.0 if s < 3 else 500.0, spec_harvest_ms=lambda s: 100.0 * s)
    assert [*run.work["draft training"].values()] == [1.0, 0.0, 0.5, 0.0]
    assert [*run.work["harvest"].values()] == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(("value", "level"), [(2.9, None), (3.0, None), (3.5, "bad")])
def test_evidence_against_the_engines_sampling_is_an_error_from_a_thousand_to_one(value, level):
    found = [f.level for f in findings_of(made(3, spec_exactness=lambda s: value * (s == 2))) if "1000 to 1" in f.text]
    assert found == ([level] if level else [])


def test_runs_are_compared_step_by_step_with_the_plain_one():
    flag, plain = real("verl-flag"), real("verl-plain")
    found = {c.what: c for c in compare(flag, plain)}
    whole = found["whole step"]
    ratios = [plain.steps[s]["step_s"] / flag.steps[s]["step_s"] for s in range(2, 9)]
    assert (whole.first, whole.last, whole.ratio) == (2, 8, Spread.of(ratios))
    assert "generation, per token" in found


def test_the_step_that_starts_things_up_is_no_comparison():
    quick, slow = (
        made(4, spec_acceptance_length=3.0),
        LoggedRun("plain", "verl", {s: {"step_s": 20.0} for s in range(1, 5)}),
    )
    (found,) = compare(quick, slow)
    assert (found.first, found.ratio) == (2, Spread(2.0, 2.0, 2.0, 3))


def test_what_training_hides_of_generation_is_no_comparison():
    report = make_report([DATA / "verl-lag1", DATA / "verl-plain"])
    assert {c.what for c in report.comparisons} == {"whole step"}
    assert any("training does not hide" in caveat for caveat in report.caveats)


def test_runs_of_different_trainers_are_not_compared():
    report = make_report([DATA / "verl-plain", DATA / "trl-flag"])
    assert report.comparisons == ()
    assert report.caveats == ("trl-flag is a run of TRL, verl-plain of verl: they are not compared",)


def test_a_base_that_is_no_run_is_refused_with_the_names():
    with pytest.raises(ReportError, match="--base other: no run of this name; there are: verl-flag, verl-plain"):
        make_report([DATA / "verl-flag", DATA / "verl-plain"], "other")
    assert make_report([DATA / "verl-flag", DATA / "verl-plain"], "verl-flag").base == "verl-flag"


def test_a_run_of_thousands_of_steps_is_gone_through_as_often_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all spans of a run are told from is put together once: a draft on and off for 5,000 steps once took minutes."""
    asked: list[str] = []
    series = LoggedRun.series
    monkeypatch.setattr(LoggedRun, "series", lambda run, name: (asked.append(name), series(run, name))[1])
    counts = []
    for steps in (40, 4000):
        codes = [as_metrics(Reason.PREDICTED_TO_PAY), as_metrics(Reason.BELOW_BREAK_EVEN)]
        known = {"spec/train_ms": 1.0, "spec/train_steps": 1.0, "spec/expected_acceptance": 1.0}
        run = LoggedRun("r", "verl", {s: {**codes[s % 2], **known, "spec/train_ms": float(s)} for s in range(1, steps)})
        asked.clear()
        assert len(spans_of(run)) == steps - 1
        counts.append(len(asked))
        assert run.expected is run.expected
    assert counts[0] == counts[1]
