from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spec_plugin.engine.control import TOKENS, Control, ControlGroup, plain_tokens
from spec_plugin.engine.schedule.plain import is_plain


@pytest.mark.parametrize(("share", "members"), [(0.0, 0), (0.02, 20), (0.5, 500), (1.0, 1000)])
def test_the_share_of_the_requests_is_in_it_evenly_spaced(share, members):
    group = ControlGroup(share, 3, seed=1)
    drawn = [group.draw() is not None for _ in range(1000)]
    assert abs(sum(drawn) - members) <= 1
    gaps = [j - i for i, j in zip(*[[n for n, d in enumerate(drawn) if d][k:] for k in (0, 1)], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


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
    off = Control(first, k).extra_args
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


def test_plain_tokens_are_found_by_their_place_in_the_document():
    mask = torch.zeros(4, 200, dtype=torch.bool)
    said = [
        Control(64, 3).span(30, 145),
        {},
        {"spec_plain_from": -1.0, "spec_plain_until": -1.0},
        Control(64, 3).span(9, 64),
    ]
    plain = plain_tokens(mask, said, [30, 30, 1, 9])
    assert plain[0].nonzero().flatten().tolist() == list(range(64, 128))
    assert not plain[1:].any()
    assert plain_tokens(mask[:1], said[:1], [1])[0].nonzero().flatten().tolist() == list(range(93, 157))
    assert plain_tokens(mask[:1], said[:1], [100])[0].nonzero().flatten().tolist() == list(range(58))


def test_a_turn_that_ended_early_says_nothing_of_the_next_one():
    assert Control(64, 3).span(10, 100) == {"spec_plain_from": 74, "spec_plain_until": 110}
    assert Control(64, 3).span(10, 64) == {}
