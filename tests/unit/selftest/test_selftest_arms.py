"""What the self-test's stages ask of an engine: how long a sample is, of which arm, and from which cache; and what excuses it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from spec_plugin.engine.selftest import stages, verdicts
from spec_plugin.engine.selftest.evidence import Evidence
from spec_plugin.engine.selftest.plan import SelfTestPlan
from spec_plugin.engine.selftest.verdicts import Sampled, evidence_check

PLAN = SelfTestPlan(prompts=[[1]] * 4, sampling={}, k=3, vocab_size=8, alpha=1e-6, seconds=0.0, max_num_seqs=64)


class Probe:
    """Writes down what is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.engine, self.max_num_seqs, self.top, self.sampling, self.logprobs_mode = self, 64, 0, {}, ""

    async def reset_prefix_cache(self) -> None:
        self.asked.append("reset")

    def params(self, tokens: int, plain: bool, **_: Any) -> tuple[int, bool]:
        return tokens, plain

    async def sample(self, index: int, _prompt: Any, params: tuple[int, bool]) -> Sampled:
        self.asked.append(params)
        n, one = params[0], np.zeros(params[0])
        return Sampled(index, (1,) * n, one, np.zeros((n, 0)), np.zeros((n, 0), int), one.astype(int))


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    nothing = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    monkeypatch.setattr(stages, "read_spec_counters", lambda: nothing)
    return Probe()


async def each(checks: Any) -> list[Any]:
    return [check async for check in checks]


def test_law_2_both_arms_sample_two_whole_rounds_of_verification_after_the_first_token(probe: Probe) -> None:
    """A sampler that is wrong in its second round is not seen in one."""
    asyncio.run(each(stages.samples_stage(probe, PLAN, stages.Arms(), begun=time.perf_counter())))  # type: ignore[arg-type]
    assert {tokens for tokens, _ in probe.asked} == {2 * (PLAN.k + 1) + 1}
    assert probe.asked.count((9, True)) == probe.asked.count((9, False)) > 0, "one arm drafts, and one does not"


def test_law_2_log_probs_are_not_recomputed_from_what_speculation_wrote(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rescore(*_: Any) -> float:
        probe.asked.append("rescore")
        return 0.0

    monkeypatch.setattr(stages, "_rescore", rescore)
    arm = [asyncio.run(probe.sample(0, [1], (9, False)))]
    probe.asked.clear()
    stage = stages.logprobs_stage(probe, PLAN, stages.Arms(arm, arm), time.perf_counter(), 0.25)  # type: ignore[arg-type]
    asyncio.run(each(stage))
    assert probe.asked[:2] == ["reset", "rescore"]


@pytest.mark.parametrize(
    ("plain", "passed", "unproven"), [(1e-9, True, True), (0.3, False, False), (0.9, False, False)]
)
def test_law_2_only_a_plain_arm_that_is_refused_itself_excuses_the_other(
    plain: float, passed: bool, unproven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = iter(
        (np.log(1e9), np.log(1 / plain))
    )  # speculating, then plain: of a correct one anything up to 1 / alpha
    monkeypatch.setattr(verdicts, "_stated", lambda *_: None)
    monkeypatch.setattr(verdicts, "evidence", lambda _: Evidence(float(next(ratios)), 100, "something"))
    check = evidence_check([], [], 8, alpha=1e-6)
    assert (check.passed, check.unproven) == (passed, unproven), SimpleNamespace(said=check.detail)
