"""Several engines' answers as one: what counts for all of them must hold for each."""

from __future__ import annotations

import pytest

from spec_plugin.actor.links import merge_refreshes, merge_reports, merge_stats
from spec_plugin.events import Check, RefreshReport, RolloutStats, SelfTestReport, StepTiming

TOOK = RefreshReport(True, 2, "two", 5.0)
REFUSED = RefreshReport(False, 1, "one", 3.0, "torn")


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_law_5_a_refresh_is_installed_only_if_every_engine_installed_it(refusing):
    report = merge_refreshes([REFUSED if i == refusing else TOOK for i in range(3)])
    assert not report.installed
    assert (report.draft_version, report.digest) == (1, "one"), "what is served is the draft before"
    assert report.reason == f"engine {refusing}: torn"
    assert merge_refreshes([TOOK] * 3) == TOOK


def test_a_single_engines_reason_is_said_as_it_is():
    assert merge_refreshes([REFUSED]) == REFUSED


def test_counts_of_engines_side_by_side_add_up_and_the_slowest_decides_the_time():
    timing = StepTiming(4, 2, False, 0.1, 7)
    one = RolloutStats(3, 10, 500, 2.0, 100, 300, 250, (95, 85, 70), (timing,))
    other = RolloutStats(3, 20, 900, 5.0, 10, 10, 5, (5,), (timing,), interrupted=True)
    merged = merge_stats([one, other])
    assert merged == RolloutStats(
        3, 30, 1400, 5.0, 110, 310, 255, (100, 85, 70), (timing, timing), 0, (), interrupted=True
    )
    assert merge_stats([one]).interrupted is False


def test_law_2_one_engine_that_fails_its_self_test_is_enough_and_is_named():
    good, bad = (SelfTestReport((Check("greedy", passed, "numbers"),), 2.0 + passed) for passed in (True, False))
    for reports, failing in (((good, good, bad), 2), ((bad, good), 0)):
        merged = merge_reports(reports)
        assert not merged.passed and merged.seconds == 3.0
        assert merged.failures() == f"  engine {failing} greedy: numbers"
    assert merge_reports((good, good)).passed and merge_reports((bad,)) is bad
