"""A phase on a real engine: what validation before the rollouts did is none of theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live import MAX_NUM_SEQS, K, live_engine, prompts
from spec_plugin_conformance.tiny import tiny_config

from spec_plugin import SpecConfig
from spec_plugin.api.events import RolloutStats, Schedule, TargetInfo
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.vllm.schedule.channel import schedule_state
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession

pytestmark = pytest.mark.engine
ROLLOUT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
TOKENS = 60
#: no draft makes so many tokens a step: the guard drops it
HOPELESS = Schedule((K,) * (MAX_NUM_SEQS + 1), tuple([9.0] * (MAX_NUM_SEQS + 1)))
FINE = Schedule((K,) * (MAX_NUM_SEQS + 1), tuple([0.1] * (MAX_NUM_SEQS + 1)))


@pytest.fixture(scope="module")
def live() -> Any:
    return live_engine()


@pytest.fixture
def front(live) -> EngineFront:
    target = TargetInfo("", tiny_config().to_dict(), "float32", max_num_seqs=MAX_NUM_SEQS, sampling=ROLLOUT)
    front = EngineFront(SpecSession(SpecConfig(k=K), target, create_manager((), (), load_entry_points=False)), None)
    front.engine = live.engine
    return front


async def ask(front: EngineFront, name: str, sampling: dict[str, Any]) -> None:
    """Eight requests at once, as an adapter's ``generate`` hands them on."""
    from vllm import SamplingParams

    async def one(i: int, prompt: list[int]) -> None:
        params = SamplingParams(**sampling, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        async with front.sample(prompt, sampling) as request:
            params.extra_args = request.extra_args
            async for output in front.engine.generate({"prompt_token_ids": prompt}, params, request_id=f"{name}-{i}"):
                last = output
            request.completed(last.outputs[0].token_ids)

    await asyncio.gather(*[one(i, prompt) for i, prompt in enumerate(prompts())])


async def phase(front: EngineFront, schedule: Schedule, *parts: tuple[str, dict[str, Any]]) -> RolloutStats:
    await front.set_schedule(schedule)
    front.start_phase(0)
    for name, sampling in parts:
        await ask(front, name, sampling)
    return await front.stats(0)


def test_validation_before_the_rollouts_is_not_counted_and_costs_them_no_draft(live, front):
    async def run() -> tuple[list[int], RolloutStats]:
        await front.set_schedule(HOPELESS)
        front.start_phase(0)
        await ask(front, "validation", GREEDY)
        dropped = (await schedule_state(front.engine))["table"]
        await ask(front, "rollouts", ROLLOUT)
        return dropped, await front.stats(0)

    dropped, stats = live.run(run())
    assert not any(dropped), "the guard has dropped the draft in validation"
    assert stats.requests == 8 and stats.tokens == 8 * TOKENS
    assert stats.drafts > 0, "and the rollouts draft again"


def test_rollouts_alone_are_one_phase_and_validation_among_them_belongs_to_it(live, front):
    plain = live.run(phase(front, FINE, ("first", ROLLOUT), ("second", ROLLOUT)))
    assert plain.requests == 16 and plain.tokens == 16 * TOKENS
    among = live.run(phase(front, FINE, ("a", ROLLOUT), ("b", GREEDY), ("c", ROLLOUT)))
    assert among.requests == 24, "nothing that was counted of the rollouts is lost"


def test_validation_alone_is_counted(live, front):
    assert live.run(phase(front, FINE, ("only", GREEDY))).requests == 8
