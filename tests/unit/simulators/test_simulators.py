"""A few of the simulated runs of ``make guards``: the bounds that docs/guards.md states hold in them, and truth is what it is."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace

import pytest
from builders.paths import ROOT
from simulators import controller, drafts_law, exactness, guard, run, selftest, waiting


def _tenth(kind):
    """A kind of run at scale, with responses a tenth as long."""
    return replace(kind, tokens=kind.tokens // 10, most=kind.most // 10)


#: drafts that learn, that never do, that go stale, that are about break-even, and answers of three tokens
_NAMED = ("learns to 0.75 in ten", "never learns", "good until", "just about", "answers of 3 tokens, good")
FIVE = [truth for truth in controller.TRUTHS if truth.name.startswith(_NAMED)]
#: of each simulator's twin at scale as much as takes seconds; all of them: ``make guards``
A_QUARTER = (replace(guard.AT_SCALE[0], sequences=64, judged=64),)
DRAINS = (replace(_tenth(controller.AT_SCALE[0]), at_most=1.0),)  # half of so few phases come before it has learnt
QUEUES = (replace(_tenth(waiting.AT_SCALE[0]), tokens=100),)


@pytest.mark.parametrize(
    ("simulate", "runs", "phases", "kinds"),
    [
        (run.correct_guard, 1, 30, {"settings": guard.SETTINGS}),
        (run.wrong_guard, 2, 20, {"settings": guard.SETTINGS}),
        (run.self_tests, 1, 0, {}),
        (run.controllers, 1, 40, {"truths": FIVE}),
        (run.waitings, 1, 30, {"settings": waiting.SETTINGS}),
        pytest.param(run.correct_guard, 1, 6, {"settings": A_QUARTER}, id="correct_guard_at_scale"),
        pytest.param(run.controllers, 1, 15, {"truths": DRAINS}, id="controllers_at_scale"),
        pytest.param(run.waitings, 1, 0, {"settings": QUEUES}, id="waitings_at_scale"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_stated_of_a_guard_holds_in_a_few_runs(simulate, runs, phases, kinds) -> None:
    shown = simulate(map, runs, phases, **kinds)
    print(*shown.rows, sep="\n")
    assert shown.broken == []
    assert all(len(row) == len(shown.head) for row in shown.rows) and shown.rows


def test_a_wide_vocabulary_hides_no_wrong_temperature_and_no_draft_that_is_accepted_unasked() -> None:
    """Twins at scale: a right engine is not refused, and one of each kind of mistake is."""
    mistakes = dict(selftest.MISTAKES)
    wrong = mistakes["temperature 0.8 for 1.0"], mistakes["a bad draft accepted unasked in 10 % of the steps"]
    assert not selftest.run(0, wide=True).failed
    assert all(selftest.run(1, mistake, wide=True).failed for mistake in wrong)


def test_statistics_of_the_draft_have_mean_zero_under_the_policy_and_see_its_tokens() -> None:
    laws = exactness.laws_of(2.9)
    assert all(abs(p @ drafts_law.of_draft(p, q)).max() < 1e-12 for p, q in zip(laws.actor, laws.draft, strict=True))
    assert drafts_law.tokens_until_refused(2.9, "bonus token from the draft", True, 30, 464, 0) < 12_000


def test_evidence_of_exact_sampling_spares_a_right_engine_and_stops_a_wrong_one_late_in_texts_or_in_the_run() -> None:
    assert exactness.run(0.5, "", 20, 1024, 0).highest < 2.0
    for options in ({}, {"late": True}, {"begins": 20}):
        found = exactness.run(2.9, "temperature 0.9", 20, 1024, 1, **options)
        assert found.stopped_after is not None and found.stopped_after <= 10_240, options


def test_tokens_that_are_chosen_by_what_follows_them_stop_a_right_engine_and_by_a_coin_they_do_not() -> None:
    assert exactness.select("a coin for each token (the rule)", 5, 128, 0).stopped_after is None
    assert exactness.select("only those that are rewarded", 5, 128, 0).stopped_after is not None


def test_text_that_is_wrong_from_its_first_token_is_noticed_among_texts_of_up_to_16k() -> None:
    found = guard.run(A_QUARTER[0], 3, 6, guard.Off(0.4))
    assert found.noticed_after == 0


def test_a_fault_begins_in_a_phase_that_drafts_and_is_noticed_no_earlier() -> None:
    found = [guard.run(guard.SETTINGS[0], seed, 40, guard.Off(0.8)) for seed in range(10)]
    assert all(o.fault_at is not None and o.fault_at % 5 and not o.false_stop for o in found)
    assert all(o.noticed_after == 0 for o in found)


def test_two_requests_of_the_control_group_are_no_measure_of_how_far_the_policy_has_moved() -> None:
    """If two were enough, this run would be stopped in phase 63."""
    assert not guard.run(guard.SETTINGS[5], 306, 75).false_stop


@pytest.mark.parametrize("index", [0, 5, 11, 12, 13])
def test_the_time_that_a_run_would_have_taken_without_drafts_is_told_as_it_is(index):
    """Of a draft that learns, a useless one, short responses and the shortest ones, whose last steps are cut."""
    told = [controller.run(controller.TRUTHS[index], seed, 30).told for seed in range(3, 6)]
    print(controller.TRUTHS[index].name, told)
    assert 0.9 < statistics.median(told) < 1.1 and min(told) > 0.8 and max(told) < 1.2


def test_the_same_seed_is_the_same_run() -> None:
    truth = controller.TRUTHS[5]
    assert controller.run(truth, 7, 40) == controller.run(truth, 7, 40) != controller.run(truth, 8, 40)


def test_a_bound_that_does_not_hold_is_told() -> None:
    truths = [replace(truth, at_most=0.1) for truth in controller.TRUTHS]
    assert sum("a run took" in what for what in run.controllers(map, 1, 5, truths).broken) == len(truths)


def test_the_page_has_the_tables_of_the_command() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("guards.md", "explain/controller.md"))
    at_scale = (module.AT_SCALE for module in (guard, waiting, controller))
    for kind in (
        kind.name for kinds in (guard.SETTINGS, waiting.SETTINGS, controller.TRUTHS, *at_scale) for kind in kinds
    ):
        assert re.search(rf"^\| {re.escape(kind)} \|", page, re.M), kind
    assert f"a vocabulary of {selftest.WIDE:,}" in page
    assert "make guards" in page


@pytest.mark.parametrize("table", [run.guard_rules, run.guard_floors, run.guard_words])
def test_the_page_says_what_the_provenance_guard_judges_by_as_the_code_has_it(table) -> None:
    page = (ROOT / "docs" / "guards.md").read_text()
    assert run.as_markdown(table()) in page, "paste the output of: make guards ARGS='--only rules --markdown'"
