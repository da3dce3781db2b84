from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from spec_plugin.config import SpecConfig
from spec_plugin.conformance.tiny import tiny_config
from spec_plugin.engine.front import EngineFront
from spec_plugin.errors import LosslessError
from spec_plugin.events import DraftRefresh, Schedule, TargetInfo
from spec_plugin.manager import create_manager
from spec_plugin.session import SpecSession


@pytest.fixture
def front(tmp_path, monkeypatch) -> EngineFront:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    target = TargetInfo(path="", hf_config=tiny_config().to_dict(), dtype="float32", max_num_seqs=8)
    return EngineFront(SpecSession(SpecConfig(), target, create_manager((), (), load_entry_points=False)), None)


@pytest.mark.parametrize(("given", "expected"), [({}, 20), ({"max_logprobs": 1}, 20), ({"max_logprobs": 50}, 50)])
def test_the_self_test_can_ask_for_the_log_probs_that_tell_a_tie(front, given, expected):
    """OpenRLHF with importance sampling correction allows a single one."""
    assert front.engine_arguments(given, "some.Extension")["max_logprobs"] == expected


def test_all_log_probs_stay_all(front):
    assert front.engine_arguments({"max_logprobs": -1}, "some.Extension")["max_logprobs"] == -1


@dataclass
class Core:
    """What the front asks of an engine: each call by its name, and one that fails."""

    broken: str = ""
    error: type[BaseException] = RuntimeError
    answers: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    @property
    def engine_core(self) -> Core:
        return self

    async def _call(self, name: str) -> Any:
        self.calls.append(name)
        if name == self.broken:
            raise self.error(f"{name} is broken")
        return self.answers.get(name, [])

    async def reset_prefix_cache(self) -> Any:
        return await self._call("reset_prefix_cache")

    async def call_utility_async(self, name: str, *_: Any) -> Any:
        return await self._call(name)

    async def collective_rpc(self, name: str, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(f"file there: {Path(kwargs['path']).exists()}") if kwargs and "path" in kwargs else None
        return await self._call(name)

    async def is_paused(self) -> bool:
        return False


DRAFT, NOTHING = Schedule((3,) * 9), Schedule((0,) * 9)
SETTING = ("reset_prefix_cache", "spec_set_schedule", "spec_pause")


def test_nobody_is_in_the_control_group_while_nothing_is_drafted(front):
    front.engine = Core()
    asyncio.run(front.set_schedule(replace(NOTHING, control_share=1.0)))
    assert front.control() is None
    asyncio.run(front.set_schedule(replace(DRAFT, control_share=1.0)))
    assert front.control() is not None


def test_law_3_the_actor_says_how_many_are_in_the_control_group_and_else_the_options_do(front):
    front.engine = Core()
    for said, share in ((0.5, 0.5), (None, 0.02)):
        asyncio.run(front.set_schedule(replace(DRAFT, control_share=said)))
        members = sum(front.control() is not None for _ in range(1000))
        assert members == pytest.approx(1000 * share, abs=1)


def test_law_3_an_engine_that_was_told_nothing_yet_drafts(front):
    assert front.drafting


@pytest.mark.parametrize("before", [DRAFT, NOTHING], ids=["drafting", "plain"])
@pytest.mark.parametrize("broken", SETTING)
def test_law_3_while_it_is_not_known_what_is_in_force_text_counts_as_drafted(broken, before, front):
    front.engine = Core()
    asyncio.run(front.set_schedule(before))
    front.engine = Core(broken)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(front.set_schedule(NOTHING))
    assert front.drafting
    front.sampled([1], [2, 3], 4, None)
    (span,) = front.take_spans()
    assert span.plain_first == span.plain_until
    front.engine = Core()
    asyncio.run(front.go_plain())
    assert not front.drafting and front.engine.calls == list(SETTING)


def test_law_6_bookkeeping_that_fails_costs_a_request_nothing_and_is_said_once(front, caplog):
    with caplog.at_level(logging.WARNING), front.request():
        for _ in range(3):
            front.sampled([1], ["no token"], 0, None)
        asyncio.run(front.arrives({"temperature": "warm"}))
    assert front.take_spans() == []
    said = [r.getMessage() for r in caplog.records]
    assert sum("which policy version sampled a response" in text for text in said) == 1
    assert sum("what is validation" in text for text in said) == 1


def test_law_6_a_paused_engine_that_does_not_say_how_far_it_is_stops_nothing(front, caplog):
    front.engine = Core("spec_in_flight")
    with caplog.at_level(logging.WARNING), front.request() as request:
        asyncio.run(front.paused())
        front.resumed()
        front.landed(request, [1], [2, 3], None)
    assert request.lost is False and front.take_spans() == []
    assert len(caplog.records) == 1


def test_law_2_what_must_stop_the_run_passes_the_bookkeeping(front):
    front.engine = Core("spec_in_flight", LosslessError)
    with pytest.raises(LosslessError):
        asyncio.run(front.paused())


def test_rollouts_behind_validation_begin_a_phase_of_their_own_and_go_on_where_that_fails(front, caplog):
    for broken in ("", "spec_take_steps"):
        front.engine = Core(broken)
        front.reset_phase()
        asyncio.run(front.arrives({"temperature": 0.0}))
        with front.request() as request:
            request.tokens = 7
        with caplog.at_level(logging.WARNING):
            asyncio.run(front.arrives({}))
        assert front._flights.tokens == (7 if broken else 0)
    assert [r.getMessage() for r in caplog.records if "validation is counted" in r.getMessage()]


def refresh() -> DraftRefresh:
    return DraftRefresh(3, 2, {"w": torch.ones(2)}, "digest")


def test_a_draft_is_handed_over_in_a_file_that_is_gone_afterwards_also_where_a_worker_fails(front, monkeypatch):
    made: list[Path] = []
    monkeypatch.setattr("spec_plugin.engine.front.save_file", lambda tensors, file: (made.append(file), file.touch()))
    row = {"installed": True, "draft_version": 3, "digest": "digest", "milliseconds": 1.0, "reason": ""}
    front.engine = Core(answers={"spec_install_file": [row, row | {"installed": False, "reason": "torn"}]})
    report = asyncio.run(front.install_tensors(refresh(), force=False))
    assert not report.installed and report.reason == "torn", "one worker of two is not enough"
    front.engine.broken = "spec_install_file"
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(front.install_tensors(refresh(), force=False))
    assert front.engine.calls.count("file there: True") == 2
    assert len(made) == 2 and not any(file.parent.exists() for file in made)


def test_workers_that_hold_several_drafts_are_no_state(front):
    held = {"target": "t", "draft": "d", "embed": "e", "head": "h", "draft_version": 1}
    front.engine = Core(answers={"spec_audit": [held, held | {"draft": "e"}]})
    state = asyncio.run(front.state("synced"))
    assert state.draft_version == 1 and state.target_digest == "t" and state.draft_digest not in ("d", "e")
    front.engine = Core(answers={"spec_audit": [held, held | {"draft_version": 2}]})
    with pytest.raises(RuntimeError, match="several versions"):
        asyncio.run(front.state("synced"))


def test_stats_are_of_the_phase_alone(front, monkeypatch):
    counted = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6, "accepted_per_pos": [4, 2, 0]}
    monkeypatch.setattr("spec_plugin.engine.front.read_spec_counters", lambda: dict(counted))
    front.engine = Core(answers={"spec_take_steps": [[2, 3, False, 0.5, 9, 0.0]]})
    front.start_phase(5)
    counted |= {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15, "accepted_per_pos": [9, 5, 1]}
    with front.request() as request:
        request.tokens = 11
    stats = asyncio.run(front.stats(5))
    assert (stats.requests, stats.tokens, stats.drafts, stats.accepted_per_pos) == (1, 11, 6, (5, 3, 1))
    assert stats.steps[0].k == 3 and front.policy_version == 5 and not front.busy
