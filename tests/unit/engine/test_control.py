from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from spec_plugin.engine.control_group import TOKENS, ControlGroup, ControlStretch
from spec_plugin.engine.vllm.schedule.plain import is_plain


@pytest.mark.parametrize(("share", "members"), [(0.0, 0), (0.02, 20), (0.5, 500), (1.0, 1000)])
def test_the_share_of_the_requests_is_in_it_evenly_spaced(share, members):
    group = ControlGroup(share, 3, seed=1)
    drawn = [group.draw() is not None for _ in range(1000)]
    assert abs(sum(drawn) - members) <= 1
    gaps = [j - i for i, j in zip(*[[n for n, d in enumerate(drawn) if d][k:] for k in (0, 1)], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("share", "requests"), [(0.02, 48), (0.02, 500), (0.05, 30), (0.3, 10)])
def test_the_first_requests_of_each_phase_are_in_it_where_none_is_wanted_elsewhere(share, requests):
    group, chosen = ControlGroup(share, 3, seed=1), []
    for phase in range(60):
        group.begin()
        drawn = [group.draw() is not None for _ in range(requests)]
        chosen.append(sum(drawn))
        assert not phase or not any(drawn[sum(drawn) :]), "none but the first ones"
    assert abs(sum(chosen) - 60 * share * requests) <= 5
    phases = [i for i, n in enumerate(chosen) if n and i]
    apart = [b - a for a, b in pairwise(phases)]
    assert set(apart) == {1} if share * requests >= 4 else max(apart) <= 5 and min(apart) >= 2


def test_a_phase_that_is_shorter_or_longer_than_the_one_before_takes_no_more_than_its_share_in_the_end():
    group, chosen, asked = ControlGroup(0.05, 3, seed=1), 0, 0
    for phase in range(200):
        group.begin()
        for _ in range(requests := (100, 10, 0, 300)[phase % 4]):
            chosen += group.draw() is not None
        asked += requests
    assert chosen == pytest.approx(0.05 * asked, abs=20), "as many as the longest phase has"


def test_evenly_spaced_where_each_batch_that_is_judged_wants_some():
    group = ControlGroup(0.1, 3, seed=1)
    group.first = False
    for _ in range(5):
        group.begin()
        drawn = [n for n in range(100) if group.draw()]
        assert {b - a for a, b in pairwise(drawn)} <= {10, 11}


def test_stretches_lie_anywhere_in_a_response_of_mean_length():
    group = ControlGroup(1.0, 3, seed=0)
    assert {c.first for c in (group.draw() for _ in range(20)) if c} == {0}
    for _ in range(200):
        group.ended(5 * TOKENS + 10)
    assert {c.first for c in (group.draw() for _ in range(200)) if c} == {TOKENS * i for i in range(5)}


@pytest.mark.parametrize("first", [0, 128])
def test_whatever_was_under_way_the_stretch_has_no_draft(first):
    """Each step emits 1 to k + 1 tokens, and drafts are asked for with the tokens known then, and up to k + 1 in flight."""
    k = 3
    off = ControlStretch(first, k).extra_args
    for offset in range(k + 1):
        for in_flight in range(k + 2):
            for position in range(first, first + TOKENS):
                # the token at ``position`` was sampled in a step that began up to k tokens before it
                known = max(0, position - offset - in_flight)
                request = SimpleNamespace(
                    sampling_params=SimpleNamespace(extra_args=off), num_output_tokens=known, num_output_placeholders=0
                )
                assert is_plain(request)


def test_placeholders_of_asynchronous_scheduling_count():
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args={"spec_off": [10, 20]}),
        num_output_tokens=8,
        num_output_placeholders=2,
    )
    assert is_plain(request)
    request.num_output_placeholders = 1
    assert not is_plain(request)
    request.sampling_params.extra_args = {"spec_off": True}
    assert is_plain(request)
    request.sampling_params.extra_args = None
    assert not is_plain(request)


def test_a_stretch_ends_with_its_response_and_one_that_ended_early_has_none():
    assert ControlStretch(64, 3).span(30, 145) == (94, 158)
    assert ControlStretch(64, 3).span(10, 100) == (74, 110)
    assert ControlStretch(64, 3).span(10, 64) == (0, 0)
