"""What text counts as old, and what a sequence is held against where the policy has not moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.batches import batch_of

from spec_plugin.policy.provenance.exact import by_lag
from spec_plugin.policy.provenance.reference import Reference
from spec_plugin.policy.provenance.rules import Precision


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
def test_law_3_steps_that_were_trained_since_the_sync_count_as_versions(lags: bool, ahead: int) -> None:
    """The weights that recompute have moved: at lag 0 a correct run would be stopped by the bounds of one policy."""
    scores = -torch.ones(2, 3)
    batch = replace(batch_of(5, scores, scores, sampled_by=4 if lags else 5), lag_allowed=lags, ahead=ahead)
    assert [lag for lag, _ in by_lag(batch)] == [ahead + lags]
    unstated = replace(batch, rollout=None)
    assert [lag for lag, _ in by_lag(unstated)] == [ahead + lags]


def test_law_3_a_batch_that_is_wrong_as_a_whole_is_no_measure_of_itself_where_the_policy_has_not_moved() -> None:
    wrong = dict.fromkeys(range(8), 3.0)
    refused = Reference(0, Precision("bfloat16", scale=1.0)).judge_sequences(wrong)
    assert refused is not None and refused.sequences == tuple(wrong)
