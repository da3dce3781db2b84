"""The self-test of recurrent states: what is judged of what was sampled; the sampling is tested on real engines."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spec_plugin.engine.selftest.recurrent import _differences, _drift
from spec_plugin.engine.selftest.self_test_plan import Sampled


def sampled(tokens: list[int], log_probs: list[float]) -> Sampled:
    empty = np.zeros((len(tokens), 1))
    return Sampled(1, tuple(tokens), np.asarray(log_probs), empty, empty)


def test_log_probs_are_compared_as_long_as_the_tokens_are_the_same():
    found, expected = sampled([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0]), sampled([5, 6, 9, 8], [-1.5, -2.0, -9.0, -9.0])
    assert _differences([found], [expected]) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("mean", "base", "passes"), [(0.006, 0.0, True), (0.0064, 0.0, False), (0.04, 0.01, True), (0.041, 0.01, False)]
)
def test_law_2_a_mean_is_held_against_what_rounding_explains(mean: float, base: float, passes: bool):
    assert _drift([mean] * 4, [base] * 4, tolerance=0.1).passed == passes


@pytest.mark.parametrize(("spec", "plain"), [([], [0.1]), ([0.1], []), ([], [])])
def test_law_2_a_test_that_compared_nothing_has_not_passed_and_has_found_nothing_wrong(spec, plain):
    check = _drift(spec, plain, tolerance=0.1)
    assert not check.passed and check.out_of_time
    assert not _drift([math.nan], [0.1], tolerance=0.1).passed and not _drift([math.nan], [0.1], 0.1).out_of_time
