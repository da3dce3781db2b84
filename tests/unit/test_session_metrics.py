"""What reaches the trainer's logger is finite, whatever a plugin says."""

from __future__ import annotations

import math

import pytest
from test_session import session_with

from spec_plugin import hookimpl


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_left_out_and_the_others_are_not(value):
    class Mine:
        @hookimpl
        def spec_metrics(self):
            return {"spec/mine": value, "spec/other": 1.0}

    metrics = session_with(Mine()).metrics()
    assert "spec/mine" not in metrics and metrics["spec/other"] == 1.0
    assert all(math.isfinite(v) for v in metrics.values())
