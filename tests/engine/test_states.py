"""Targets with recurrent states: the self-test passes a correct engine and sees planted faults; no context is too short."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import hybrid
from live import VOCAB, K, close_all

from spec_plugin.api.events import Check
from spec_plugin.engine.selftest.probe import TOP, Probe
from spec_plugin.engine.selftest.recurrent import states_stage
from spec_plugin.engine.selftest.self_test_plan import Sampled, SelfTestPlan, questions_and_noise
from spec_plugin.engine.selftest.test import run_self_test
from spec_plugin.engine.selftest.verdicts import greedy_check
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters

pytestmark = pytest.mark.engine
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
CONTEXT = 64


@pytest.fixture(scope="module")
def engine() -> Iterator[hybrid.Hybrid]:
    close_all()  # of other modules: one engine lives at a time
    live = hybrid.start()
    yield live
    live.close()


def plan(seed: int = 0) -> SelfTestPlan:
    return SelfTestPlan(
        prompts=questions_and_noise(None, VOCAB, seed),
        sampling=SAMPLING,
        k=K,
        vocab_size=VOCAB,
        alpha=1e-6,
        seconds=30.0,
        limit=120.0,
        max_num_seqs=hybrid.AT_ONCE,
        whole=True,
    )


def states(live: hybrid.Hybrid, seed: int = 0) -> dict[str, bool]:
    """Which of the checks of states pass."""

    async def checks() -> list[Check]:
        return [check async for check in states_stage(Probe(live.engine, SAMPLING, hybrid.AT_ONCE), plan(seed))]

    found = live.run(checks(), timeout=600)
    for check in found:
        print(f"  {'ok ' if check.passed else 'BAD'} {check.name}: {check.detail}")
    return {check.name: check.passed for check in found}


def test_the_self_test_passes_a_correct_engine_within_its_time(engine):
    report = engine.run(run_self_test(engine.engine, plan()), timeout=600)
    print(*(f"\n{c.name}: {c.detail}" for c in report.checks))
    assert report.passed, report.failures()
    names = {check.name for check in report.checks}
    assert {"states: tokens", "states: log-probs", "states: drift", "samples: counts"} <= names
    assert report.break_even


#: what begins a prompt in another request's state is not seen: it fades within the prompt, of plain requests as well
UNSEEN = {"stale"}
DAILY = {"first", "one more"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.family)
        for name in sorted(hybrid.FAULTS.keys() - UNSEEN)
    ],
)
def test_a_state_that_is_taken_up_at_the_wrong_place_is_seen(engine, fault):
    engine.fault(fault)
    try:
        passed = states(engine)
    finally:
        engine.fault("")
    assert not all(passed.values())
    assert all(states(engine, seed=1).values()), "and nothing of it is left behind"


async def _to_the_end(live: hybrid.Hybrid, plain: bool) -> list[Sampled]:
    """Requests of different lengths, all of which fill the context."""
    probe, rng = Probe(live.engine, SAMPLING, hybrid.AT_ONCE), random.Random(5)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(CONTEXT - 24 + 2 * i)] for i in range(8)]
    options = {"temperature": 0.0, "logprobs": TOP}
    params = [probe.params(CONTEXT - len(p), plain, **options) for p in prompts]
    return await asyncio.gather(*(probe.sample(i, p, q) for i, (p, q) in enumerate(zip(prompts, params, strict=True))))


@pytest.mark.parametrize(
    "scheduler", ["spec_plugin.engine.vllm.schedule.scheduler.make_scheduler", "hybrid.without_preemption"]
)
def test_states_are_right_up_to_the_end_of_the_context(scheduler):
    """Without preemption the last tokens are wrong, or vLLM's CPU engine dies."""
    close_all()
    live = hybrid.start(max_model_len=CONTEXT, scheduler_cls=scheduler)
    wrong: str | None = None
    try:
        plain = live.run(_to_the_end(live, plain=True))
        before = read_spec_counters()
        spec = live.run(_to_the_end(live, plain=False))
        accepted = read_spec_counters()["accepted_tokens"] - before["accepted_tokens"]
        check = greedy_check(spec, plain, Probe(live.engine, SAMPLING, hybrid.AT_ONCE).tolerance)
        print(check.detail, accepted)
        assert accepted > 8, "or no state stands behind a drafted token"
        wrong = None if check.passed else check.detail
    except Exception as error:
        if isinstance(error, AssertionError):
            raise
        wrong = str(error)
    finally:
        live.close()
    assert (wrong is None) == (scheduler != "hybrid.without_preemption"), wrong
