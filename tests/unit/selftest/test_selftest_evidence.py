"""The self-test's error level by enumeration, its tolerances, and its plan of time."""

from __future__ import annotations

import asyncio
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from spec_plugin.engine.selftest import stages
from spec_plugin.engine.selftest.evidence import Stated, evidence
from spec_plugin.engine.selftest.plan import SelfTestPlan
from spec_plugin.engine.selftest.test import tolerance
from spec_plugin.engine.selftest.verdicts import Sampled

CHANCES = np.array([0.5, 0.3, 0.15, 0.05])  # of the tokens 0 to 3, of which the first two are the top
TOP = np.log(CHANCES[:2])


def stated(tokens: tuple[int, ...]) -> Stated:
    drawn, n = np.array(tokens), len(tokens)
    rank = np.where(drawn < 2, drawn, -1)
    return Stated(np.log(CHANCES[drawn]), np.tile(TOP, (n, 1)), np.tile([0, 1], (n, 1)), rank, len(CHANCES))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_law_2_the_evidence_against_a_correct_engine_is_at_most_one_on_average(length):
    """Then it exceeds 1 / alpha with a chance of alpha at most (Markov), whatever it is a mixture of."""
    mean = sum(
        float(CHANCES[list(tokens)].prod()) * math.exp(evidence(stated(tokens)).log_ratio)
        for tokens in itertools.product(range(len(CHANCES)), repeat=length)
    )
    assert 0.9 < mean <= 1.0 + 1e-9


@pytest.mark.parametrize(("dtype", "nats"), [(torch.float32, 1e-3), (torch.float16, 0.03125), (torch.bfloat16, 0.25)])
def test_log_probs_may_differ_by_two_steps_of_their_dtype_where_logits_are(dtype, nats):
    assert tolerance(dtype) == nats


def test_the_time_of_a_cold_engine_is_not_what_the_rounds_are_planned_with(monkeypatch):
    now, batches = [0.0], []

    async def batch(_probe, pairs, _tokens, logprobs):
        now[0] += 1.0 if not batches else 0.01
        batches.append(len(pairs))
        one = np.zeros(2)
        arm = [Sampled(i, (1, 2), one, np.zeros((2, 0)), np.zeros((2, 0), int), one.astype(int)) for i, _ in pairs]
        return arm, arm

    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(stages, "read_spec_counters", lambda: {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0})
    monkeypatch.setattr(stages, "_side_by_side", batch)
    plan = SelfTestPlan(prompts=[[1]] * 4, sampling={}, k=3, vocab_size=8, alpha=1e-6, seconds=8.0, max_num_seqs=64)
    probe = SimpleNamespace(max_num_seqs=64, top=0, sampling={}, logprobs_mode="")
    arms = stages.Arms()

    async def checks() -> list[str]:
        return [check.name async for check in stages.samples_stage(probe, plan, arms, begun=0.0)]

    assert len(asyncio.run(checks())) == 4
    assert len(batches) == 2 + stages.MOST_CHEAP_SAMPLES // 8, "as many as fit at the pace of a warm engine"
    assert len(arms.spec) == len(arms.plain) == 32 * (len(batches) - 2)
