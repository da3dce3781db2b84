"""Which version sampled a token: what the trainer was told of a sequence's ends, and what the engines said, in one tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.batches import batch_of
from builders.provenance import guard, refusal

from spec_plugin.api.events import LogprobBatch
from spec_plugin.trainer.spec_run import Responses

NOW, T = 5, 4
NOBODY, CUT = [-1] * T, [4, 4, 5, 5]


def checked(told: tuple[int, int], said: list[int], lags: bool, mask: list[int] | None = None) -> LogprobBatch:
    """A sequence of four tokens, and one beside it of which nobody knows anything."""
    first, last = (torch.tensor([version, -1]) for version in told)
    batch = batch_of(NOW, -torch.ones(2, T), None, torch.tensor([mask or [1] * T, [1] * T]).bool())
    responses = Responses([], [], batch.mask, None, (first, last))
    versions = responses.versions(torch.tensor([said, NOBODY]), NOW, lags)
    assert versions[1].tolist() == NOBODY
    return replace(batch, versions=versions, lag_allowed=lags)


def test_where_rollouts_lag_engines_say_which_token_is_of_which_version():
    assert checked((4, 5), CUT, lags=True).versions[0].tolist() == CUT
    assert checked((3, 5), CUT, lags=True).versions[0].tolist() == CUT, "a request of the third sampled nothing"


def test_what_no_engine_has_said_is_what_the_trainer_knows():
    assert checked((4, 4), NOBODY, lags=True).versions[0].tolist() == [4] * T
    assert checked((3, 5), NOBODY, lags=True).versions[0].tolist() == [3, -1, -1, 5]
    assert checked((3, 5), [-1, -1, 4, -1], lags=True).versions[0].tolist() == [3, -1, 4, 5]
    assert checked((5, 5), NOBODY, lags=False).versions[0].tolist() == [5] * T


def test_ends_are_those_of_what_was_sampled():
    assert checked((3, 5), NOBODY, lags=True, mask=[0, 1, 1, 0]).versions[0, 1:3].tolist() == [3, 5]
    assert checked((3, 5), NOBODY, lags=True, mask=[0, 1, 0, 0]).versions[0, 1] == 3, "the oldest that it can be of"


@pytest.mark.parametrize("said", [NOBODY, CUT])
@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [0, 0, 1, 0]])
@pytest.mark.parametrize(
    ("told", "lags", "why"),
    [
        ((4, 6), True, "A later version than the trainer"),
        ((6, 6), True, "A later version than the trainer"),
        ((5, 4), True, "name different versions"),
        ((4, 4), False, "synchronous"),
        ((4, 5), False, "synchronous"),
        ((5, 6), False, "synchronous"),
    ],
)
def test_law_3_versions_of_which_the_trainer_knows_that_they_cannot_be_are_refused(told, lags, why, said, mask):
    message = refusal(checked(told, said, lags, mask), guard("bfloat16"))
    assert why in message and "1 of 2 sequences" in message and "sequence 0 by version" in message


@pytest.mark.parametrize(
    ("told", "said", "shown"),
    [
        ((5, 5), CUT, "4 to 5"),
        ((4, 4), CUT, "4 to 5"),
        ((3, 3), [-1, -1, 4, -1], "3 to 4"),
        ((4, 5), [3, 4, 5, 5], "3 to 5"),
    ],
)
def test_law_3_a_version_that_the_trainer_excludes_is_refused_whatever_the_engine_says(told, said, shown):
    message = refusal(checked(told, said, lags=True), guard("bfloat16"))
    assert f"sequence 0 by version {shown}" in message and "name different versions" in message
