from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from spec_plugin_conformance.tiny import tiny_config
from vllm import SamplingParams

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import LosslessError
from spec_plugin.api.events import DraftRefresh, Schedule, TargetInfo
from spec_plugin.api.spans import FORGOTTEN
from spec_plugin.engine.flight import Request
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.vllm.schedule.plain import PLAIN
from spec_plugin.engine.vllm.schedule.utilities import NUMBER
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession


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


def a_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any = None, **options: Any) -> EngineFront:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    target = TargetInfo(path="", hf_config=tiny_config().to_dict(), dtype="float32", max_num_seqs=8)
    session = SpecSession(SpecConfig(**options), target, create_manager((), (), load_entry_points=False))
    if method is not None:
        monkeypatch.setattr(session, "method", method(session.method))
    return EngineFront(session, None)


@pytest.mark.parametrize(("level", "asked"), [(1, []), (2, ["spec_look_at_draft"])])
def test_workers_look_at_their_draft_before_it_is_dropped_for_the_first_time(tmp_path, monkeypatch, level, asked):
    front = a_front(tmp_path, monkeypatch, sleep_level=level)
    front.engine = core = Core()
    asyncio.run(front.look_at_draft())
    assert core.calls == asked


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
        return self.answers.get(name, (0.0, [], [0, 0]) if name == "spec_rest_of_steps" else [])

    async def reset_prefix_cache(self) -> Any:
        return await self._call("reset_prefix_cache")

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        answer = await self._call(name)
        return {"table": args[0]} if name == "spec_set_schedule" else answer

    async def collective_rpc(self, name: str, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(f"file there: {Path(kwargs['path']).exists()}") if kwargs and "path" in kwargs else None
        return await self._call(name)

    async def is_paused(self) -> bool:
        return False


DRAFT, NOTHING = Schedule((3,) * 9), Schedule((0,) * 9)


def sampled(front: EngineFront, response: list[Any], version: int | None = None, **sampling: Any) -> Request:
    """One request, as an adapter has it sampled."""

    async def one() -> Request:
        async with front.sample([1], sampling) as request:
            request.completed(response, version)
        return request

    return asyncio.run(one())


SETTING = ("reset_prefix_cache", "spec_set_schedule", "spec_pause")


def test_nobody_is_in_the_control_group_while_nothing_is_drafted(front):
    front.engine = Core()
    asyncio.run(front.set_schedule(replace(NOTHING, control_share=1.0)))
    assert front.draw_control_stretch() is None
    asyncio.run(front.set_schedule(replace(DRAFT, control_share=1.0)))
    assert front.draw_control_stretch() is not None


def test_law_3_the_actor_says_how_many_are_in_the_control_group_and_else_the_options_do(front):
    front.engine = Core()
    for said, share in ((0.5, 0.5), (None, 0.02)):
        asyncio.run(front.set_schedule(replace(DRAFT, control_share=said)))
        members = sum(front.draw_control_stretch() is not None for _ in range(1000))
        assert members == pytest.approx(1000 * share, abs=1)


def test_law_3_an_engine_that_was_told_nothing_yet_drafts(front):
    assert front.schedule.drafting


@pytest.mark.parametrize("before", [DRAFT, NOTHING], ids=["drafting", "plain"])
@pytest.mark.parametrize("broken", SETTING)
def test_law_3_while_it_is_not_known_what_is_in_force_text_counts_as_drafted(broken, before, front):
    front.engine = Core()
    asyncio.run(front.set_schedule(before))
    front.engine = Core(broken)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(front.set_schedule(NOTHING))
    assert front.schedule.drafting
    sampled(front, [2, 3], 4)
    (span,) = front.take_spans()
    assert span.plain_first == span.plain_until
    front.engine = Core()
    asyncio.run(front.go_plain())
    assert not front.schedule.drafting and front.engine.calls == list(SETTING)


def test_law_6_bookkeeping_that_fails_costs_a_request_nothing_and_is_said_once(front, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sampled(front, ["no token"], 0, temperature="warm")
    assert set(front.take_spans()) == {FORGOTTEN}, "who asks is told that there was more"
    said = [r.getMessage() for r in caplog.records]
    assert sum("which policy version sampled a response" in text for text in said) == 1
    assert sum("what is validation" in text for text in said) == 1


def test_law_6_a_paused_engine_that_does_not_say_how_far_it_is_stops_nothing(front, caplog):
    front.engine = Core("spec_in_flight")

    async def cut() -> Request:
        async with front.sample([1], {}) as request:
            front.pausing()
            await front.paused()
            front.resumed()
            request.completed([2, 3])
        return request

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(cut()).lost is False
    assert front.take_spans() == []
    assert len(caplog.records) == 1


def test_law_2_what_must_stop_the_run_passes_the_bookkeeping(front):
    front.engine = Core("spec_in_flight", LosslessError)
    with pytest.raises(LosslessError):
        asyncio.run(front.paused())


def test_rollouts_behind_validation_begin_a_phase_of_their_own_and_go_on_where_that_fails(front, caplog):
    for broken in ("", "spec_take_steps"):
        front.engine = Core(broken)
        front.reset_phase()
        asyncio.run(front.on_request({"temperature": 0.0}))
        with front.request() as request:
            request.tokens = 7
        with caplog.at_level(logging.WARNING):
            asyncio.run(front.on_request({}))
        assert front._tracker.tokens == (7 if broken else 0)
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


def test_a_draft_goes_where_its_bytes_have_room(front, monkeypatch, tmp_path):
    asked: list[int] = []
    monkeypatch.setattr("spec_plugin.engine.front.place_for", lambda size: asked.append(size) or tmp_path)
    draft = refresh()
    with contextlib.suppress(RuntimeError):
        front.engine = Core(answers={})
        front.engine.broken = "spec_install_file"
        asyncio.run(front.install_tensors(draft, force=False))
    assert asked == [sum(t.numel() * t.element_size() for t in draft.tensors.values())] and asked[0] > 0


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
    assert stats.busy_seconds == stats.seconds, "never more than the phase"


#: as the step log tells steps: nine that were alike, and three that were not
ALIKE, MIXED = [2, 3, False, 0.5, 9, 0.0, 18, 18, True, False], [2, 3, False, 0.5, 3, 0.0, 6, 3, False, False]


@pytest.mark.parametrize(
    ("rows", "busy", "in_all"),
    [
        ([ALIKE], 4.5, 4.5),
        ([ALIKE], 7.0, 7.0),  # a few were longer than the median
        ([ALIKE], 4.0, 4.5),  # or shorter
        ([ALIKE, MIXED, [*MIXED[:3], 1.5, 2, *MIXED[5:9], True]], 9.0, 9.0),
        ([[*MIXED[:3], 40.0, *MIXED[4:]]], 120.0, 100.0),
    ],
)
def test_how_long_the_engine_was_busy_in_all(front, monkeypatch, rows, busy, in_all):
    none = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    monkeypatch.setattr("spec_plugin.engine.front.read_spec_counters", lambda: {"accepted_per_pos": [], **none})
    front.engine = Core(answers={"spec_take_steps": rows, "spec_rest_of_steps": [busy, [0, 3], [300, 64]]})
    front.start_phase(5)
    monkeypatch.setattr(type(front._tracker), "seconds", 100.0)
    stats = asyncio.run(front.stats(5))
    assert stats.busy_seconds == in_all
    assert [list(vars(s).values()) for s in stats.steps] == rows
    assert stats.past_end_per_pos == (0, 3) and (stats.prompt_tokens, stats.recomputed_tokens) == (300, 64)


@pytest.mark.parametrize(
    ("sampling", "drafted"),
    [
        ({"temperature": 0.7}, True),
        ({"min_tokens": 5}, False),
        ({"stop": ["\n"]}, False),
        ({"extra_args": {"theirs": 1}}, False),
    ],
)
@pytest.mark.parametrize("params", [dict, SamplingParams])
def test_law_2_a_request_with_options_outside_of_the_allow_list_runs_without_drafts(params, sampling, drafted, front):
    asyncio.run(front_of_a_phase(front, 0.0))
    request = sampled_with(front, params(**sampling))
    given = dict(sampling.get("extra_args", {}))
    number = {NUMBER: request.number}
    assert request.extra_args == {**given, **number, **({} if drafted else PLAIN)}


async def front_of_a_phase(front: EngineFront, share: float) -> None:
    front.engine = Core()
    await front.set_schedule(replace(DRAFT, control_share=share))


def sampled_with(front: EngineFront, options: Any) -> Request:
    async def one() -> Request:
        async with front.sample([1], options) as request:
            request.completed(list(range(200)), 4)
        return request

    return asyncio.run(one())


def test_validation_has_no_control_group_which_is_the_rollouts_behind_it(front):
    async def sampled_with(options: dict[str, Any]) -> list[bool]:
        found = []
        for _ in range(3):
            async with front.sample([1], options) as request:
                request.completed([2] * 5)
                found.append(request.control is not None)
        return found

    async def phase() -> tuple[list[bool], list[bool]]:
        await front_of_a_phase(front, 1.0)
        greedy = await sampled_with({"temperature": 0.0})
        return greedy, await sampled_with({"temperature": 1.0})

    assert asyncio.run(phase()) == ([False] * 3, [True] * 3)


def test_law_3_what_the_control_group_samples_without_drafts_is_kept_with_the_version(front):
    asyncio.run(front_of_a_phase(front, 1.0))
    request = sampled_with(front, {})
    assert request.control is not None and "spec_off" in request.extra_args
    (span,) = front.take_spans()
    assert (span.version, span.first, span.until) == (4, 1, 201)
    assert (span.plain_first, span.plain_until) == request.control.span(1, 200) != (0, 0)
    assert span.log_probs is None


def test_log_probs_that_the_trainer_has_not_asked_for_are_in_the_span(front):
    async def one() -> None:
        async with front.sample([1], {}) as request:
            request.completed([2, 3], 4, [-0.5, -0.25], asked=False)

    asyncio.run(one())
    (span,) = front.take_spans()
    assert (span.first, span.until, list(np.frombuffer(span.log_probs))) == (1, 3, [-0.5, -0.25])


def test_a_request_waits_while_the_engine_is_paused_for_new_weights(front):
    front.engine = Core(answers={"spec_in_flight": []})
    seen: list[str] = []

    async def one() -> None:
        async with front.sample([1], {}) as request:
            seen.append("in")
            request.completed([2])

    async def scene() -> None:
        front.pausing()
        await front.paused()
        waiting = asyncio.create_task(one())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not seen and not front.busy and not front.open, "and it is not on the clock"
        front.resumed()
        await waiting

    asyncio.run(scene())
    assert seen == ["in"] and front.open


def test_a_request_that_fails_says_nothing_of_what_was_sampled(front):
    async def one() -> None:
        async with front.sample([1], {}):
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        asyncio.run(one())
    assert front.take_spans() == [] and not front.busy
