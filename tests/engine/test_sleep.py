"""A real engine that sleeps, with freed memory full of garbage: refresh, audit and the order of a weight sync."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import small
import torch
from refreshing import acceptance_length, push, send_target, target_bits
from spec_plugin_cpu.sleeping import sleep_on_cpu

from draft_training import digest
from spec_plugin.engine.sleep import PARTS, SleepState

pytestmark = pytest.mark.engine


class Engine:
    """The shared engine, with OpenRLHF's way to put it to sleep: part by part, and it is known what sleeps."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.state = llm, SleepState()

    async def sleep(self, level: int = 1) -> None:
        self.llm.sleep(level)
        self.state.slept()

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        for tag in PARTS if tags is None else tags:
            self.llm.wake_up([tag])
        self.state.woke(tags)

    def awake(self, *parts: str) -> Any:
        return self.state.awake(parts, self.wake_up, self.sleep)


@pytest.fixture
def engine(llm, config):
    sleep_on_cpu()
    assert push(llm, small.good_tensors(config))["installed"]
    engine = Engine(llm)
    yield engine
    asyncio.run(engine.wake_up())


def nan_weights(llm: Any) -> bool:
    """Is every weight of target and draft gone."""

    def look(worker: Any) -> bool:
        models = (worker.model_runner.get_model(), worker.get_draft_model())
        return all(bool(p.isnan().all()) for m in models for p in m.parameters() if p.is_floating_point())

    return bool(small.rpc(llm, look))


@pytest.fixture
def checkpoint(target) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(target / "model.safetensors")


def test_level_1_brings_target_and_draft_back_and_no_kv_cache(llm, engine, greedy_reference):
    before, draft = small.rpc(llm, target_bits), small.live_digest(llm)
    asyncio.run(engine.sleep())
    assert nan_weights(llm) and small.rpc(llm, "spec_lost_draft")
    asyncio.run(engine.wake_up())
    after = small.rpc(llm, target_bits)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert small.live_digest(llm) == draft and not small.rpc(llm, "spec_lost_draft")
    assert small.greedy(llm) == greedy_reference and acceptance_length(llm) > 3.5


def test_a_write_into_sleeping_memory_is_noticed(llm, engine, config):
    asyncio.run(engine.sleep())
    push(llm, small.draft_tensors(config, seed=2))
    with pytest.raises(RuntimeError, match="written to while it slept"):
        llm.wake_up(["weights"])


def test_the_first_refresh_of_a_sleeping_engine_arrives_and_leaves_it_asleep(llm, engine, config, greedy_reference):
    """OpenRLHF puts its engines to sleep as soon as they are made, and nobody wakes them before the first rollout."""
    assert push(llm, small.draft_tensors(config, seed=3))["installed"]
    tensors = small.good_tensors(config)

    async def refresh() -> dict[str, Any]:
        await engine.sleep()
        async with engine.awake("weights"):
            report = push(llm, tensors)
        return report

    assert asyncio.run(refresh())["installed"]
    assert nan_weights(llm), "the trainer needs the memory"
    asyncio.run(engine.wake_up())
    assert small.live_digest(llm) == digest(tensors) and not small.rpc(llm, "spec_lost_draft")
    assert small.greedy(llm) == greedy_reference and acceptance_length(llm) > 3.5


def test_an_audit_of_a_sleeping_engine_reads_its_weights_and_not_what_lies_there(llm, engine):
    awake = small.rpc(llm, "spec_audit")

    async def audit() -> tuple[dict[str, Any], dict[str, Any]]:
        await engine.sleep()
        asleep = small.rpc(llm, "spec_audit")
        async with engine.awake("weights"):
            return asleep, small.rpc(llm, "spec_audit")

    asleep, woken = asyncio.run(audit())
    assert woken == awake and asleep["target"] != awake["target"] and asleep["draft"] != awake["draft"]


@pytest.mark.parametrize("level", [1, 2])
def test_wake_weights_sync_refresh_wake_kv_cache(llm, engine, config, checkpoint, greedy_reference, level):
    """The order of both trainers; level 2 also drops what no refresh sends: the map of an unpruned vocabulary."""
    tensors, version = small.good_tensors(config), small.rpc(llm, "spec_draft_info")["draft_version"]

    async def step() -> None:
        await engine.sleep(level)
        await engine.wake_up(["weights"])
        assert small.rpc(llm, "spec_lost_draft") == (level == 2)
        send_target(llm, checkpoint)
        report = push(llm, tensors, version=version, force=True)  # an untrained draft keeps its version
        assert report["installed"], report
        await engine.wake_up(["kv_cache"])

    asyncio.run(step())
    assert small.rpc(llm, "spec_audit")["draft"] == digest(tensors)
    assert small.greedy(llm) == greedy_reference and acceptance_length(llm) > 3.5


def test_buffers_of_the_draft_that_sleep_dropped_come_back_with_its_refresh(
    llm, engine, config, checkpoint, greedy_reference
):
    """As vLLM 0.24 leaves them after level 2, which saves the target's buffers only."""
    tensors, version = small.good_tensors(config), small.rpc(llm, "spec_draft_info")["draft_version"]

    def drop(worker: Any) -> int:
        own = list(worker.get_draft_model().buffers())
        for buffer in own:
            buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        return len(own)

    async def step() -> None:
        await engine.sleep(2)
        await engine.wake_up(["weights"])
        assert small.rpc(llm, drop) > 0
        send_target(llm, checkpoint)
        report = push(llm, tensors, version=version, force=True)
        assert report["installed"], report
        await engine.wake_up(["kv_cache"])

    asyncio.run(step())
    assert small.greedy(llm) == greedy_reference and acceptance_length(llm) > 3.5
