"""Stages of the self-test that ask the engine a second time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from spec_plugin.engine.selftest import stages
from spec_plugin.engine.selftest.verdicts import Sampled


def _sequence(prompt: int) -> Sampled:
    top = np.full((9, 2), -0.1)
    return Sampled(prompt, (5,) * 9, top[:, 0], top, np.full((9, 2), 5), np.zeros(9, dtype=np.int64))


@pytest.mark.parametrize(("differ", "passes"), [({7}, True), ({7, 200}, False), (set(range(0, 512, 20)), False)])
def test_a_token_that_differs_too_much_counts_if_others_are_found_that_do(monkeypatch, differ, passes):
    """As where rounding turns a choice of experts, which plain requests have shown no case of."""
    seen = []

    async def rescore(_probe, _plan, sampled, _t, _tolerance):
        seen.append(sampled.prompt)
        return 1.2 if sampled.prompt == 0 and len(seen) // 2 in differ else 0.02

    class Engine:
        async def reset_prefix_cache(self):
            pass

    async def checks():
        arm = [_sequence(prompt=0) for _ in range(64)]
        arms = stages.Arms(arm, [_sequence(prompt=1) for _ in range(64)])
        probe = SimpleNamespace(engine=Engine(), max_num_seqs=16)
        plan = SimpleNamespace(seconds=30.0)
        return [c async for c in stages.logprobs_stage(probe, plan, arms, time.perf_counter(), 0.25)]

    monkeypatch.setattr(stages, "_rescore", rescore)
    (check,) = asyncio.run(checks())
    assert check.passed is passes, check.detail
    assert len(seen) == 2 * (512 if len(differ) < 5 else stages.SCORED)
    assert "max 1.2" in check.detail
