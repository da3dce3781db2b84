"""A cost model that has observed steps whose seconds follow a known law."""

from __future__ import annotations

import random

from spec_plugin.api.events import StepTiming
from spec_plugin.step_cost.model import CostModel

BATCHES, KS = (1, 8, 32, 64), (0, 1, 3)


def timings(seconds, batches=BATCHES, ks=KS, noise=0.0, steps=50, seed=0):
    rng = random.Random(seed)
    return [
        StepTiming(b, k, k == 0, seconds(b, k, k == 0) * rng.lognormvariate(0.0, noise), steps)
        for b in batches
        for k in ks
    ]


def model(seconds, **options) -> CostModel:
    out = CostModel()
    out.observe(timings(seconds, **options))
    return out


def memory_bound(draft: float):
    """A target forward takes 10 ms whatever its tokens, a draft forward ``draft`` times that: Leviathan's setting."""
    return lambda batch, k, paused: 0.010 * (1 + draft * k)


def compute_bound(batch, k, paused):
    """1 ms a token, and a draft of a tenth of that."""
    tokens = batch * (k + 1)
    return 1e-3 * tokens + (0.0 if paused else 1e-4 * tokens) + 1e-4 * batch * max(0, k - 1)
