"""Several engines' answers as one: what counts for all of them must hold for each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders.steps import mixed_steps

from spec_plugin.api.errors import LosslessError
from spec_plugin.api.events import Check, RefreshReport, RolloutStats, SelfTestReport, StepPair, StepTiming
from spec_plugin.trainer.links import ActorsLink, merge_refreshes, merge_reports, merge_stats

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
    pair = StepPair(4, 2, 0.1, 0.2)
    mixed = mixed_steps(4, 2, True, 0.7, 7, 20)
    one = RolloutStats(3, 10, 500, 2.0, 100, 300, 250, (95, 85, 70), (timing, mixed), pairs=(pair,), busy_seconds=1.5)
    one = replace(one, past_end_per_pos=(0, 2), prompt_tokens=90, recomputed_tokens=16)
    other = RolloutStats(
        3, 20, 900, 5.0, 10, 10, 5, (5,), (timing, mixed), interrupted=True, pairs=(pair,), busy_seconds=4.0
    )
    other = replace(other, past_end_per_pos=(1,), prompt_tokens=10, recomputed_tokens=32)
    merged = merge_stats([one, other])
    assert merged == RolloutStats(
        3,
        30,
        1400,
        5.0,
        110,
        310,
        255,
        (100, 85, 70),
        (replace(timing, steps=14, forwards=56, drafted=56), replace(mixed, steps=14, forwards=56, drafted=40)),
        0,
        (),
        interrupted=True,
        pairs=(pair, pair),
        past_end_per_pos=(1, 2),
        prompt_tokens=100,
        recomputed_tokens=48,
        busy_seconds=4.0,
        parts=(one, other),
    )
    assert merge_stats([one]).interrupted is False


def test_law_2_one_engine_that_fails_its_self_test_is_enough_and_is_named():
    good, bad = (SelfTestReport((Check("greedy", passed, "numbers"),), 2.0 + passed) for passed in (True, False))
    for reports, failing in (((good, good, bad), 2), ((bad, good), 0)):
        merged = merge_reports(reports)
        assert not merged.passed and merged.seconds == 3.0
        assert merged.failures() == f"  engine {failing} greedy: numbers"
    assert merge_reports((good, good)).passed and merge_reports((bad,)) is bad


def an_engine(answer: Any, seconds: float = 0.0) -> Any:
    """Whose every call ends so."""

    async def remote(*_: Any) -> Any:
        await asyncio.sleep(seconds)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return SimpleNamespace(spec_do=SimpleNamespace(remote=remote))


@pytest.mark.parametrize("later", [0.0, 0.01])
def test_law_2_an_engine_that_must_stop_the_run_is_heard_behind_one_that_only_fails(later):
    wrong = RuntimeError("the other side failed")
    wrong.__cause__ = LosslessError("not the target's")
    link = ActorsLink([an_engine(1), an_engine(OSError("gone")), an_engine(wrong, later)], timeout_s=5.0)
    with pytest.raises(RuntimeError, match="the other side failed"):
        asyncio.run(link.call_all("spec_do"))


def test_of_several_engines_that_fail_the_first_is_told_when_all_have_answered():
    answered = []

    class Slow:
        @staticmethod
        async def remote() -> None:
            await asyncio.sleep(0.01)
            answered.append(1)

    engines = [an_engine(OSError("first")), an_engine(ValueError("second")), SimpleNamespace(spec_do=Slow)]
    with pytest.raises(OSError, match="first"):
        asyncio.run(ActorsLink(engines, timeout_s=5.0).call_all("spec_do"))
    assert answered, "no call is left behind in flight"
    assert asyncio.run(ActorsLink([an_engine(1), an_engine(2)], timeout_s=5.0).call_all("spec_do")) == [1, 2]
