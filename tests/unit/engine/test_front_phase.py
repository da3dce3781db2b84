"""What an engine's front makes of its workers' answers, and of the requests, counters and clock of a phase."""

from __future__ import annotations

import asyncio
import multiprocessing
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.training import TARGET
from safetensors.torch import load_file

pytest.importorskip("vllm")

from draft_training import folders as locks
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import DraftRefresh, Schedule, SelfTestReport
from spec_plugin.engine import front as front_module
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.plan import own_folders as folders

NO_DRAFTS = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_per_pos": []}
TABLE = (0, *[3] * TARGET.max_num_seqs)


class Engine:
    """vLLM's, as far as the front asks it: writes down what it is asked, and answers what it was given."""

    def __init__(self, **answers: Any) -> None:
        nothing: dict[str, Any] = {
            "spec_take_steps": [],
            "spec_rest_of_steps": (0.0, [], [0, 0]),
            "spec_take_pairs": [],
        }
        self.answers, self.calls, self.engine_core = nothing | answers, [], self
        self.seen: dict[str, Any] = {}

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return {"table": args[0]} if method == "spec_set_schedule" else self.answers.get(method)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.calls.append(method)
        if method == "spec_install_file":
            file = Path(kwargs["path"])
            self.seen = {**kwargs, "tensors": load_file(file), "mode": stat.S_IMODE(file.parent.stat().st_mode)}
        return self.answers.get(method)

    async def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    async def is_paused(self) -> bool:
        return False


@pytest.fixture
def counters(monkeypatch) -> dict[str, Any]:
    """vLLM's counters, which a test may move on."""
    now = dict(NO_DRAFTS)
    monkeypatch.setattr(front_module, "read_spec_counters", lambda: dict(now))
    return now


@pytest.fixture
def front(counters, tmp_path, monkeypatch) -> EngineFront:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return front_of()


def front_of(sampling: dict[str, Any] | None = None) -> EngineFront:
    target = replace(TARGET, sampling=sampling or {})
    out = EngineFront(SpecSession(SpecConfig(), target, create_manager(load_entry_points=False)), None)
    out.engine = Engine()
    return out


def verdict(installed: bool, version: int = 2, reason: str = "") -> dict[str, Any]:
    return {
        "installed": installed,
        "draft_version": version,
        "digest": "d",
        "milliseconds": 1.0,
        "reason": reason,
    }


def refresh(front: EngineFront, hold: bool = False) -> Any:
    draft = DraftRefresh(2, 1, {"fc.weight": torch.ones(2, 2).T}, "d")
    return asyncio.run(front.install_tensors(draft, force=False, hold=hold))


@pytest.mark.parametrize("refusing", [None, 0, 1])
def test_law_5_a_refresh_is_installed_only_if_every_worker_installed_it(front, refusing):
    reports = [verdict(i != refusing, reason="torn" if i == refusing else "") for i in range(2)]
    front.engine.answers["spec_install_file"] = reports
    report = refresh(front)
    assert report.installed == (refusing is None) and report.reason == ("" if refusing is None else "torn")


@pytest.mark.parametrize("hold", [True, False])
def test_law_8_a_draft_reaches_the_workers_in_a_file_that_only_this_user_can_read_and_that_is_gone_afterwards(
    front, hold
):
    front.engine.answers["spec_install_file"] = [verdict(True)]
    refresh(front, hold)
    seen = front.engine.seen
    assert torch.equal(seen["tensors"]["fc.weight"], torch.ones(2, 2)) and seen["names"] == ["fc.weight"]
    assert (seen["version"], seen["hold"], seen["force"]) == (2, hold, False)
    assert seen["mode"] == 0o700 and not Path(seen["path"]).parent.exists()


def test_a_draft_that_a_killed_engine_had_in_memory_is_removed_when_the_next_one_is_built(front, tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    for place in ("memory", "disk"):
        monkeypatch.setattr(folders, place, lambda: memory)
    monkeypatch.setattr(locks, "_YOUNG_S", 0.0)
    context = multiprocessing.get_context("fork")
    there = context.Event()

    class Stands(Engine):
        async def collective_rpc(self, *_: Any, **__: Any) -> Any:
            there.set()
            time.sleep(60)

    front.engine = Stands()
    killed = context.Process(target=refresh, args=(front,), daemon=True)
    killed.start()
    assert there.wait(30)
    front.engine_arguments({}, "some.Extension")
    assert len(list(memory.glob("*/draft.safetensors"))) == 1, "it is being read"
    killed.kill()
    killed.join()
    front.engine_arguments({}, "some.Extension")
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(
    ("sampling", "given", "named"),
    [
        ({"min_tokens": 5}, {}, "min_tokens"),
        ({}, {"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({}, {"scheduler_cls": "theirs.Scheduler"}, "scheduler_cls"),
        ({}, {"speculative_config": {"method": "ngram"}}, "speculative_config"),
    ],
)
def test_law_2_what_speculation_would_change_is_refused_before_the_engine_is_built(
    counters, tmp_path, monkeypatch, sampling, given, named
):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with pytest.raises(SpecConfigError, match=named):
        front_of(sampling).engine_arguments(given, "some.Extension")


def test_what_a_phase_did_is_what_the_counters_have_moved_by(front, counters):
    counters.update(drafts=100, draft_tokens=300, accepted_tokens=250, accepted_per_pos=[95, 85, 70])
    front.start_phase(4)
    counters.update(drafts=110, draft_tokens=330, accepted_tokens=262, accepted_per_pos=[103, 89, 70])
    stats = asyncio.run(front.stats(4))
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (10, 30, 12)
    assert stats.accepted_per_pos == (8, 4, 0) and stats.policy_version == 4


def test_a_table_is_set_behind_a_fresh_prefix_cache_and_a_draft_that_nobody_uses_is_paused(front):
    asyncio.run(front.set_schedule(Schedule(TABLE)))
    assert front.engine.calls == ["reset_prefix_cache", "spec_pause", "spec_set_schedule"] and front.schedule.drafting
    front.engine.calls.clear()
    asyncio.run(front.go_plain())
    assert (
        front.engine.calls == ["reset_prefix_cache", "spec_set_schedule", "spec_pause"] and not front.schedule.drafting
    )


def test_workers_that_serve_different_drafts_are_an_error(front):
    held = [{"draft_version": v, "draft": "d", "target": "t", "embed": "e", "head": "h"} for v in (3, 3)]
    front.engine.answers["spec_audit"] = held
    assert asyncio.run(front.state("synced")).draft_version == 3
    held[1]["draft_version"] = 2
    with pytest.raises(RuntimeError, match=r"several versions of the draft: \[2, 3\]"):
        asyncio.run(front.state("synced"))


def sampled(front: EngineFront, tokens: int) -> None:
    with front.request() as request:
        request.tokens = tokens


@pytest.mark.parametrize(("temperature", "tokens"), [(0.0, 7), (1.0, 12)])
def test_validation_that_samples_otherwise_is_no_part_of_the_rollouts_after_it(front, temperature, tokens):
    async def phase() -> int:
        front.start_phase(0)
        await front.on_request({"temperature": temperature})
        sampled(front, 5)
        await front.on_request({"temperature": 1.0})
        sampled(front, 7)
        return (await front.stats(0)).tokens

    assert asyncio.run(phase()) == tokens


def test_the_self_test_shares_its_error_level_is_patient_and_counts_as_no_rollout(front, monkeypatch):
    plans: list[SelfTestPlan] = []

    async def run_self_test(engine: Any, plan: SelfTestPlan) -> SelfTestReport:
        plans.append(plan)
        sampled(front, 9)
        return SelfTestReport((), 1.0)

    monkeypatch.setattr(front_module, "run_self_test", run_self_test)
    asyncio.run(front.self_test(30.0, engines=4))
    (plan,) = plans
    assert plan.alpha == 1e-6 / 4 and (plan.seconds, plan.limit) == (30.0, 120.0)
    assert asyncio.run(front.stats(0)).tokens == 0


class Tokenizer:
    """Knows fewer tokens than the embedding has rows, as Qwen's does."""

    chat_template = None

    def __len__(self) -> int:
        return 90

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 90 for letter in text]}


def test_law_2_prompts_are_the_tokenizers_and_what_is_stated_is_the_models(front, monkeypatch):
    plans: list[SelfTestPlan] = []

    async def run_self_test(engine: Any, plan: SelfTestPlan) -> SelfTestReport:
        plans.append(plan)
        return SelfTestReport((), 1.0)

    monkeypatch.setattr(front_module, "run_self_test", run_self_test)
    front.tokenizer = Tokenizer()
    asyncio.run(front.self_test(30.0))
    (plan,) = plans
    assert plan.vocab_size == front.session.target.vocab_size > 90
    assert max(token for prompt in plan.prompts for token in prompt) < 90


def test_law_3_a_request_that_goes_on_under_new_weights_is_of_both_versions_and_counted_once(front):
    async def phases() -> tuple[int, int]:
        front.start_phase(4)
        async with front.sample([1, 2], {}) as request:
            front.engine.answers["spec_in_flight"] = [[request.number, 3]]
            await front.paused()
            before = (await front.stats(4)).tokens
            front.start_phase(5)
            front.resumed()
            request.completed([3, 4, 5, 6, 7])
        return before, (await front.stats(5)).tokens

    assert asyncio.run(phases()) == (3, 2)
    assert [(s.version, s.first, s.until) for s in front.take_spans()] == [(4, 2, 5), (5, 5, 7)]


def test_a_request_that_is_not_listed_is_in_no_control_group(front):
    """It is drafted in none of its tokens: a stretch of it beside the others' would be compared with what it is not."""
    front._rollouts_began, front.draw_control_stretch = True, lambda: pytest.fail("it was asked for a stretch")

    async def ask() -> None:
        async with front.sample([1, 2], {"temperature": 1.0, "no_such_option": 3}):
            pass

    asyncio.run(ask())
