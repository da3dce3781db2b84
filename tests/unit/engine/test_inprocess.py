"""A synchronous ``LLM`` as the engine of our front: how its requests share steps, and what a batch of the trainer's becomes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from builders.training import TARGET
from vllm import SamplingParams

from spec_plugin import SpecConfig
from spec_plugin.api.errors import PatchError
from spec_plugin.api.events import EngineSchedule, Schedule
from spec_plugin.api.spans import FORGOTTEN
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.inprocess import InProcessCalls, InProcessEngine
from spec_plugin.lifecycle.session import SpecSession


class Core:
    def spec_state_of(self, *args: Any) -> Any:
        return ["core", *args]


class LLMEngine:
    """As vLLM 0.29's: requests are added, and each step gives every one of them a token."""

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(engine_core=Core())
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.running: dict[str, list[int]] = {}
        self.steps: list[int] = []
        self.aborted: list[str] = []
        self.fails_at: int | None = None

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> str:
        if params.max_tokens > 90:
            raise ValueError("too long")
        self.running[request_id] = [0, params.max_tokens]
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.steps.append(len(self.running))
        if len(self.steps) == self.fails_at:
            raise RuntimeError("the engine is gone")
        outputs = []
        for name, state in list(self.running.items()):
            state[0] += 1
            finished = state[0] == state[1]
            answer = SimpleNamespace(token_ids=list(range(state[0])))
            outputs.append(SimpleNamespace(request_id=name, finished=finished, outputs=[answer]))
            if finished:
                del self.running[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.running.pop(name, None)


class LLM:
    def __init__(self) -> None:
        self.llm_engine = LLMEngine()
        self.said: list[Any] = []

    def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        self.said.append((method, args, kwargs))
        return [method]

    def reset_prefix_cache(self) -> bool:
        return True

    def sleep(self, level: int = 1) -> None:
        self.said.append(f"sleep {level}")

    def wake_up(self, tags: Any = None) -> None:
        self.said.append(f"wake {tags}")

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=3)

    def generate(self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True) -> Any:
        self.given = sampling_params
        found = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            tokens = list(range(params.max_tokens))
            logprobs = [{t: SimpleNamespace(logprob=-float(t))} for t in tokens]
            answers = [SimpleNamespace(token_ids=tokens, logprobs=logprobs)] * params.n
            found.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=answers))
        return found


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **more)


async def lengths(engine: InProcessEngine, name: str, tokens: int) -> int:
    count = 0
    async for output in engine.generate({}, params(tokens), name):
        count = len(output.outputs[0].token_ids)
    return count


def test_requests_in_flight_share_the_engines_steps_and_late_ones_join() -> None:
    llm = LLM()
    engine = InProcessEngine(llm)

    async def everything() -> list[int]:
        first = asyncio.create_task(lengths(engine, "a", 9))
        second = asyncio.create_task(lengths(engine, "b", 8))
        while len(llm.llm_engine.steps) < 2:
            await asyncio.sleep(0)
        third = asyncio.create_task(lengths(engine, "c", 4))
        return list(await asyncio.gather(first, second, third))

    assert asyncio.run(everything()) == [9, 8, 4]
    assert llm.llm_engine.steps[0] == 2 and max(llm.llm_engine.steps) == 3 and len(llm.llm_engine.steps) < 9 + 8 + 4
    assert asyncio.run(lengths(engine, "d", 2)) == 2  # on another event loop, whose tasks are new


def test_a_request_that_nobody_waits_for_is_aborted_and_a_failure_reaches_all_that_wait() -> None:
    llm = LLM()
    engine = InProcessEngine(llm)

    async def left_early() -> None:
        stream = engine.generate({}, params(50), "a")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(left_early())
    assert llm.llm_engine.aborted == ["a"]
    llm.llm_engine.fails_at = len(llm.llm_engine.steps) + 2

    async def both() -> list[Any]:
        work = (lengths(engine, name, 9) for name in "bc")
        return list(await asyncio.gather(*work, return_exceptions=True))

    assert [str(error) for error in asyncio.run(both())] == ["the engine is gone"] * 2
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(lengths(engine, "e", 99))
    assert not engine._queues


def test_utilities_and_workers_are_reached_and_an_engine_core_elsewhere_is_named() -> None:
    llm = LLM()
    engine = InProcessEngine(llm)
    assert asyncio.run(engine.engine_core.call_utility_async("spec_state_of", 1)) == ["core", 1]
    assert asyncio.run(engine.collective_rpc("spec_settle", args=[True])) == ["spec_settle"]
    assert llm.said == [("spec_settle", (True,), None)]
    llm.llm_engine.engine_core = SimpleNamespace()
    with pytest.raises(PatchError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        InProcessEngine(llm)


def calls_of(llm: LLM, **options: Any) -> tuple[InProcessCalls, EngineFront]:
    front = EngineFront(SpecSession(SpecConfig(**options), TARGET), None)
    return InProcessCalls(front, llm), front


def test_a_batch_of_the_trainers_is_on_the_clock_with_log_probs_and_keeps_its_options() -> None:
    llm = LLM()
    _, front = calls_of(llm, control_share=0.5)
    front.schedule = EngineSchedule(Schedule((4,) * 9))
    front.start_phase(7)
    prompts = [{"prompt_token_ids": [n, n]} for n in range(6)]
    given = params(5, temperature=1.0)
    outputs = llm.generate(prompts, sampling_params=given, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [[n, n] for n in range(6)] and given.logprobs is None
    assert all(p.logprobs == 0 and p.temperature == 1.0 and p.max_tokens == 5 for p in llm.given)
    undrafted = [p for p in llm.given if "spec_off" in (p.extra_args or {})]
    assert undrafted and len(undrafted) < 6  # the control group
    spans = front.take_spans()
    assert len(spans) >= 6 and {span.version for span in spans} == {7}
    assert sum(span.log_probs is not None for span in spans) >= 6, "the trainer asked for no log-probs"
    stats = front._tracker
    assert stats.tokens == 30 and stats.requests == 6 and not front.busy
    llm.generate(prompts, sampling_params=params(5, logprobs=0))
    assert all(span.log_probs is None for span in front.take_spans())


def test_a_batch_without_options_gets_vllms_own_and_one_with_several_answers_is_not_taken_for_one() -> None:
    llm = LLM()
    _, front = calls_of(llm)
    front.start_phase(0)
    llm.generate([{"prompt_token_ids": [1]}])
    assert [p.max_tokens for p in llm.given] == [3] and front._tracker.tokens == 3
    llm.generate([{"prompt_token_ids": [1]}], params(3, n=2))
    one, other = front.take_spans()
    assert not front.busy and one != FORGOTTEN and other == FORGOTTEN


def test_an_engine_that_sleeps_is_woken_for_our_work_and_found_asleep_and_level_2_keeps_the_draft() -> None:
    llm = LLM()
    calls, front = calls_of(llm)
    llm.sleep(level=2)
    assert llm.said == ["sleep 1"]

    async def nothing(*args: Any, **kwargs: Any) -> Any:
        llm.said.append("work")

    front.self_test = front.install_tensors = front.state = nothing  # type: ignore[method-assign,assignment]
    front.engine.collective_rpc = nothing  # type: ignore[method-assign]
    asyncio.run(calls.spec_self_test(1.0))
    assert llm.said == ["sleep 1", "wake ['weights', 'kv_cache']", "work", "sleep 1"]
    for call in (calls.spec_settle(False), calls.spec_state("synced")):
        llm.said.clear()
        asyncio.run(call)
        assert llm.said == ["wake ['weights']", "work", "wake ['kv_cache']", "sleep 1"]
    llm.wake_up(tags=["weights"])
    llm.said.clear()
    asyncio.run(calls.spec_refresh(None, False))  # type: ignore[arg-type]
    assert llm.said == ["work"]  # its weights are awake
    llm.wake_up()
    llm.said.clear()
    asyncio.run(calls.spec_self_test(1.0))
    assert llm.said == ["work"]


def test_a_run_that_says_that_its_draft_comes_back_may_sleep_at_level_2() -> None:
    llm = LLM()
    calls_of(llm, sleep_level=2)
    llm.sleep(level=2)
    assert llm.said == ["sleep 2"]
