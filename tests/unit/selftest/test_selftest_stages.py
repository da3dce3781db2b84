"""What the self-test's stages ask of an engine: how long a sample is, of which arm, from which cache, and in which time."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from spec_plugin.api.events import Check
from spec_plugin.engine.selftest import stages
from spec_plugin.engine.selftest.probe import TOP, Probe
from spec_plugin.engine.selftest.self_test_plan import Sampled, SelfTestPlan

TOKENS = 9  # of a sample at k = 3: the first, and two whole rounds of verification


def plan(seconds: float = 0.0) -> SelfTestPlan:
    return SelfTestPlan(
        prompts=[[7]] * 4, sampling={}, k=3, vocab_size=32, alpha=1e-6, seconds=seconds, limit=60.0, max_num_seqs=64
    )


class Played(Probe):
    """Writes down in order what is asked of its engine, which samples token 5 and is as sure of it as ``distance`` says."""

    def __init__(self, differ: Any = (), graphs: str = "NONE") -> None:
        from vllm.config import CUDAGraphMode

        model = SimpleNamespace(dtype=SimpleNamespace(), logprobs_mode="processed_logprobs")
        compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs])
        config = SimpleNamespace(model_config=model, compilation_config=compilation)
        engine: Any = SimpleNamespace(vllm_config=config, reset_prefix_cache=self._reset)
        super().__init__(engine, {}, 64)
        self.asked: list[Any] = []
        self.differ, self.scored = set(differ), 0

    tolerance = 0.25  # type: ignore[assignment]

    async def _reset(self) -> None:
        self.asked.append("reset")

    async def sample(self, index: int, prompt: Any, params: Any, reaches: Any = None) -> Sampled:
        tokens, plain = params.max_tokens, bool(params.extra_args)
        self.asked.append((tokens, plain))
        top = np.tile(np.log(np.array([0.9, *[0.001] * (TOP - 1)])), (tokens, 1))
        if tokens == 1:  # a recomputation: that many of the speculating arm come first
            top = top - (1.2 if self.scored in self.differ else 0.02)
            self.scored += 1
        ids = np.tile(np.arange(5, 5 + TOP), (tokens, 1))
        return Sampled(index, (5,) * tokens, top[:, 0], top, ids)


@pytest.fixture(autouse=True)
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "read_spec_counters", lambda: {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0})


def samples(probe: Any, of: SelfTestPlan | None = None) -> dict[str, Check]:
    async def checks() -> dict[str, Check]:
        return {check.name: check async for check in stages.samples_stage(probe, of or plan())}

    return asyncio.run(checks())


@pytest.mark.parametrize("graphs", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_law_2_what_verifies_in_full_graphs_alone_is_seen(graphs: str) -> None:
    """An engine that is right in mixed batches, which have no such graph, and wrong where all requests draft."""

    together: set[bool] = set()  # are those plain that were asked for in this turn of the event loop

    class WrongInFullGraphs(Played):
        async def sample(self, index: int, prompt: Any, params: Any, reaches: Any = None) -> Sampled:
            together.add(bool(params.extra_args))
            await asyncio.sleep(0)
            uniform = together == {False}
            await asyncio.sleep(0)
            together.clear()
            found = await super().sample(index, prompt, params, reaches)
            wrong = uniform and self.full_graphs
            return dataclasses.replace(found, tokens=(99,) * len(found.tokens)) if wrong else found

    async def checks(probe: Played) -> list[Check]:
        return [check async for check in stages.greedy_stage(probe, plan())]

    full = graphs.startswith("FULL")
    (right,), (wrong,) = (asyncio.run(checks(kind(graphs=graphs))) for kind in (Played, WrongInFullGraphs))
    assert right.passed and right.detail.startswith("8/8" if full else "4/4")
    assert wrong.passed is not full, wrong.detail


def test_law_2_both_arms_sample_two_whole_rounds_of_verification_after_the_first_token() -> None:
    """A sampler that is wrong in its second round is not seen in one."""
    probe = Played()
    samples(probe)
    sampled = [asked for asked in probe.asked if asked != "reset" and asked[0] > 1]
    assert {tokens for tokens, _ in sampled} == {TOKENS}
    assert sampled.count((TOKENS, True)) == sampled.count((TOKENS, False)) >= 64, "one arm drafts, and one does not"


def test_law_2_log_probs_are_recomputed_plainly_and_not_from_what_speculation_wrote() -> None:
    probe = Played()
    samples(probe)
    assert probe.asked.count("reset") == 1
    behind = probe.asked[probe.asked.index("reset") + 1 :]
    assert set(behind) == {(1, True)} and len(behind) == 2 * stages.SCORED


@pytest.mark.parametrize(("differ", "passes"), [((), True), ({7}, True), ({7, 150}, False), (range(0, 200, 9), False)])
def test_law_3_one_token_that_differs_too_much_is_forgiven_and_no_more(differ: Any, passes: bool) -> None:
    """As where rounding turns a choice of experts, which plain requests have shown no case of."""
    check = samples(Played(differ))["logprobs"]
    assert check.passed is passes, check.detail
    assert ("1.2" in check.detail) == bool(differ), "it is named all the same"


def test_the_time_of_a_cold_engine_is_not_what_the_rounds_are_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rounds = [0.0], []
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(SelfTestPlan, "until", lambda self, begun, share, least=0.0: share * self.seconds)
    probe = Played()
    usual = probe.both_arms

    async def both_arms(batch: Any, tokens: int) -> Any:
        now[0] += 1.0 if not rounds else 0.01
        rounds.append(len(batch))
        return await usual(batch, tokens)

    monkeypatch.setattr(probe, "both_arms", both_arms)
    samples(probe, plan(seconds=8.0))
    assert len(rounds) == 2 + stages.MOST_CHEAP_SAMPLES // 8, "as many as fit at the pace of a warm engine"
    assert set(rounds) == {32}
