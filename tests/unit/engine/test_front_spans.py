"""What an engine's front keeps of each stretch that was sampled, until the trainer asks."""

from __future__ import annotations

import asyncio

import pytest
import torch
from builders.training import TARGET

from spec_plugin import SpecConfig
from spec_plugin.api.events import EngineSchedule, Schedule
from spec_plugin.api.spans import FORGOTTEN, Spans
from spec_plugin.engine.control_group import ControlStretch
from spec_plugin.engine.front import EngineFront
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession

PROMPT, RESPONSE = [5, 6, 7], list(range(10, 110))
DOCUMENT = torch.tensor(PROMPT + RESPONSE)


def sampled(engine: EngineFront, prompt: list[int], response: list[int], version: int) -> None:
    async def one() -> None:
        async with engine.sample(prompt, {}) as request:
            request.completed(response, version)

    asyncio.run(one())


def front(k: int) -> EngineFront:
    out = EngineFront(SpecSession(SpecConfig(control_share=0.0), TARGET, create_manager(load_entry_points=False)), None)
    out.schedule = EngineSchedule(Schedule((0, *[k] * TARGET.max_num_seqs)))
    return out


def kept(engine: EngineFront) -> tuple[list[int], list[bool]]:
    """Version and plainness of each token of the response."""
    spans = Spans()
    spans.add(engine.take_spans(), 9)
    versions, plain, *_ = spans.of([DOCUMENT], [len(PROMPT)], torch.ones(1, len(RESPONSE), dtype=torch.bool))
    return versions[0].tolist(), plain[0].tolist()


@pytest.mark.parametrize(("k", "plain"), [(0, True), (3, False)])
def test_text_of_a_phase_without_drafts_is_plain(k, plain):
    engine = front(k)
    sampled(engine, PROMPT, RESPONSE, 4)
    assert kept(engine) == ([4] * 100, [plain] * 100)


def test_of_a_drafted_request_only_the_control_groups_stretch_is_plain():
    engine = front(3)
    engine.draw_control_stretch = lambda: ControlStretch(first=20, k=3)  # type: ignore[method-assign]
    sampled(engine, PROMPT, RESPONSE, 4)
    assert kept(engine)[1] == [20 <= i < 84 for i in range(100)]


def test_each_part_of_a_response_that_was_cut_short_is_kept():
    engine = front(3)
    sampled(engine, PROMPT, RESPONSE[:40], 4)
    engine.schedule = EngineSchedule(Schedule((0,) * (TARGET.max_num_seqs + 1)))
    sampled(engine, PROMPT + RESPONSE[:40], RESPONSE[40:], 5)
    assert kept(engine) == ([4] * 40 + [5] * 60, [False] * 40 + [True] * 60)


def test_what_was_taken_is_gone_and_what_sampled_nothing_is_not_kept():
    engine = front(3)
    sampled(engine, PROMPT, [], 4)
    assert engine.take_spans() == []
    sampled(engine, PROMPT, RESPONSE, 4)
    assert len(engine.take_spans()) == 1 and engine.take_spans() == []


def test_of_a_request_whose_answer_nobody_has_recorded_it_is_said_that_one_is_missing(monkeypatch):
    engine = front(3)

    async def several_answers() -> None:
        async with engine.sample(PROMPT, {}):
            pass

    asyncio.run(several_answers())
    assert engine.take_spans() == [FORGOTTEN]
    monkeypatch.setattr(engine._tracker, "completed", lambda *_: 1 / 0)
    sampled(engine, PROMPT, RESPONSE, 4)
    assert engine.take_spans() == [FORGOTTEN]
