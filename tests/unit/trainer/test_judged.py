from __future__ import annotations

import pytest

from spec_plugin.trainer.judged import WANTED, chosen_to_recompute, share_for


@pytest.mark.parametrize("together", [0, 1, 8, 16, 64, 300, 5000])
def test_law_3_each_judged_batch_has_enough_of_the_control_group_where_that_is_possible(together):
    share = share_for(0.02, together)
    assert 0.02 <= share <= 0.5
    assert share * together >= min(WANTED, together / 2) - 1e-9
    assert share_for(0.0, together) == 0.0, "whoever wants none gets none"
    assert share_for(0.7, together) == 0.7


@pytest.mark.parametrize(
    ("controlled", "count", "chosen"),
    [
        ([False] * 24, 8, [0, 3, 6, 9, 12, 15, 18, 21]),
        ([i % 4 == 1 for i in range(24)], 8, [0, 1, 5, 7, 12, 13, 17, 19]),
        ([True] * 24, 8, [0, 1, 6, 7, 12, 13, 18, 19]),
        ([True] * 3, 8, [0, 1, 2]),
        ([False, True], 1, [0]),
        ([], 8, []),
    ],
)
def test_half_of_what_is_recomputed_is_of_the_control_group_and_the_rest_spread(controlled, count, chosen):
    assert chosen_to_recompute(controlled, count) == chosen
