"""The self-test's error level by enumeration, and its tolerances."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from spec_plugin.engine.selftest.self_test_plan import Sampled
from spec_plugin.engine.selftest.stats import evidence
from spec_plugin.engine.selftest.verdicts import tolerance

CHANCES = np.array([0.5, 0.3, 0.15, 0.05])  # of the tokens 0 to 3, of which the first two are the top
TOP = np.log(CHANCES[:2])


def sampled(tokens: tuple[int, ...]) -> Sampled:
    """Behind a first token, which is not judged."""
    drawn, n = np.array((0, *tokens)), 1 + len(tokens)
    return Sampled(0, (0, *tokens), np.log(CHANCES[drawn]), np.tile(TOP, (n, 1)), np.tile([0, 1], (n, 1)))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_law_2_the_evidence_against_a_correct_engine_is_at_most_one_on_average(length):
    """Then it exceeds 1 / alpha with a chance of alpha at most (Markov), whatever it is a mixture of."""
    mean = sum(
        float(CHANCES[list(tokens)].prod()) * math.exp(evidence([sampled(tokens)], len(CHANCES)).log_ratio)
        for tokens in itertools.product(range(len(CHANCES)), repeat=length)
    )
    assert 0.9 < mean <= 1.0 + 1e-9


@pytest.mark.parametrize(("dtype", "nats"), [(torch.float32, 1e-3), (torch.float16, 0.03125), (torch.bfloat16, 0.25)])
def test_log_probs_may_differ_by_two_steps_of_their_dtype_where_logits_are(dtype, nats):
    assert tolerance(dtype) == nats
