"""Law 2 with LoRA adapters in the engine: what is tested is what samples."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from spec_plugin_conformance.tiny import tiny_config

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import SelfTestReport, TargetInfo
from spec_plugin.engine import front as fronts
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.selftest.probe import Probe
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession

ADAPTER = SimpleNamespace(lora_int_id=123)


class Engine:
    """It keeps what each request came with, and says which adapters it has."""

    vllm_config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="processed_logprobs", max_logprobs=20))

    def __init__(self, adapters: set[int]) -> None:
        self.adapters, self.came_with = adapters, []

    async def list_loras(self) -> set[int]:
        return self.adapters

    async def generate(self, prompt: Any, params: Any, *, request_id: str, lora_request: Any) -> Any:
        self.came_with.append(lora_request)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[3], logprobs=None)])


def test_law_2_each_request_of_the_self_test_comes_with_the_runs_adapter() -> None:
    engine = Engine({123})
    probe = Probe(engine, {}, 4, ADAPTER)
    asyncio.run(probe.sample(0, [1, 2], probe.params(1, plain=False)))
    assert engine.came_with == [ADAPTER]


@pytest.mark.parametrize(("served", "asked"), [({123}, ADAPTER), (set(), None), ({7}, None)])
def test_the_self_test_is_given_the_adapter_that_the_engine_has(
    monkeypatch: pytest.MonkeyPatch, served: set[int], asked: Any
) -> None:
    plans: list[SelfTestPlan] = []

    async def run_self_test(_engine: Any, plan: SelfTestPlan) -> SelfTestReport:
        plans.append(plan)
        return SelfTestReport((), 0.0)

    async def nothing(*_: Any) -> None:
        return None

    monkeypatch.setattr(fronts, "run_self_test", run_self_test)
    monkeypatch.setattr(fronts, "pause_idle_draft", nothing)
    target = TargetInfo(path="", hf_config=tiny_config().to_dict(), dtype="float32", max_num_seqs=8)
    front = EngineFront(SpecSession(SpecConfig(), target, create_manager((), (), load_entry_points=False)), None)
    front.engine, front.adapter = Engine(served), ADAPTER
    asyncio.run(front.self_test(1.0))
    assert [plan.adapter for plan in plans] == [asked]
