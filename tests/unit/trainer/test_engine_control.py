"""What an actor process does around each rollout phase, with a link that writes down what is asked of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders.batches import batch_of, span_of
from builders.spec_run import Engines, run_of, spans_of, synced, trained
from builders.training import TARGET, sync

from spec_plugin import SpecConfig
from spec_plugin.api.events import (
    DraftRefresh,
    Drafts,
    EngineSchedule,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.api.rollouts import Rollout
from spec_plugin.api.spans import Span
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.harvest import DecoderHarvest
from spec_plugin.trainer.spec_run import SpecRun


@pytest.mark.parametrize(("overlaps", "shares"), [(False, [None, None]), (True, [0.25, 6 / 40])])
def test_law_3_the_engines_are_told_how_many_requests_each_judged_batch_needs_in_the_control_group(overlaps, shares):
    """Synchronous: as many as the options say. Else six sequences of those that are judged together, once that is known."""
    engines, told = Engines(), []

    async def set_schedule(schedule: Schedule) -> EngineSchedule:
        told.append(schedule.control_share)
        return EngineSchedule(schedule)

    engines.set_schedule = set_schedule  # type: ignore[method-assign]
    session = SpecSession(SpecConfig(), TARGET, create_manager(load_entry_points=False))
    control = run_of(session, engines, overlaps=overlaps)
    for version in range(2):
        synced(control, sync(version))
        asyncio.run(control.rollouts_begin())
        for _ in range(2):  # micro-batches of one step
            values = torch.full((20, 9), -1.0)
            session.check_logprobs(batch_of(version, values, None, drafts=Drafts.OFF))
    assert told == shares


@pytest.mark.parametrize("sleeps", [True, False])
def test_nobody_reads_the_weights_of_an_engine_that_sleeps_by_then(sleeps):
    """verl puts its engines to sleep between the rollouts and the first pass over them."""
    engines = Engines()
    session = SpecSession(SpecConfig(audit=True), TARGET, create_manager(load_entry_points=False))
    control = run_of(session, engines, sleeps=sleeps)
    synced(control, sync(0))
    asyncio.run(control.rollouts_begin())
    while_awake = len(engines.calls)
    assert {"read weights: synced", "read weights: refreshed", "read weights: rollout"} < set(engines.calls)
    asyncio.run(control.rollouts_end())
    assert engines.calls[while_awake:] == ["stats"] + (["read weights: rolled out"] if not sleeps else [])


class Remembering(Engines):
    """The same, of a method that drafts from what was sampled before."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.broken, self.told = broken, []

    async def share_rollouts(self, most_tokens: int) -> list[Rollout]:
        self.calls.append("share rollouts")
        if self.broken == "share":
            raise RuntimeError("no answer")
        return [Rollout(b"\1\0\0\0", b"\2\0\0\0")]

    async def remember(self, rollouts: Sequence[Rollout]) -> None:
        self.calls.append("remember")
        if self.broken == "remember":
            raise RuntimeError("no answer")
        self.told += rollouts


class Memory:
    """A method without a draft, whose proposer remembers."""

    def __init__(self, old: Sequence[Rollout] = ()) -> None:
        self.old, self.heard = list(old), []

    @hookimpl(tryfirst=True)
    def spec_method(self) -> Method:
        return Method("eagle3", {}, pretrained=True, variable_length=True, memory=self)

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        self.heard += rollouts

    def recall(self) -> Sequence[Rollout]:
        return self.old


def remembering(engines: Remembering, memory: Memory) -> SpecRun:
    manager = create_manager(load_entry_points=False)
    manager.register(memory)
    return run_of(SpecSession(SpecConfig(), TARGET, manager), engines)


def test_what_was_sampled_is_told_before_the_first_rollout_and_heard_after_each():
    old = [Rollout(b"", b"\3\0\0\0")]
    engines, memory = Remembering(), Memory(old)
    control = remembering(engines, memory)
    for version in range(2):
        synced(control, sync(version))
        asyncio.run(control.rollouts_begin())
        asyncio.run(control.rollouts_end())
    phase = ["set schedule", "start phase", "stats", "share rollouts"]
    assert engines.calls == ["self-test", "remember", *phase, *phase], "the self-test's own questions are no rollouts"
    assert engines.told == old and len(memory.heard) == 2
    assert not control.session.failed


def test_a_new_run_has_nothing_to_tell():
    engines = Remembering()
    control = remembering(engines, Memory())
    synced(control, sync(0))
    asyncio.run(control.rollouts_begin())
    assert "remember" not in engines.calls


@pytest.mark.parametrize("broken", ["share", "remember"])
def test_law_6_a_memory_that_breaks_costs_speculation_only(broken):
    engines, memory = Remembering(broken), Memory([Rollout(b"", b"\3\0\0\0")])
    control = remembering(engines, memory)
    for version in range(2):
        synced(control, sync(version))
        asyncio.run(control.rollouts_begin())
        asyncio.run(control.rollouts_end())
    assert control.session.failed and "no answer" in (control.session.failure or "")
    assert engines.calls.count("share rollouts") == (1 if broken == "share" else 0), "nobody asks again"


class Lagging(Engines):
    """Engines of an asynchronous trainer."""

    def __init__(self, cut_short: bool = False) -> None:
        super().__init__()
        self.cut_short, self.installed, self.said = cut_short, [], [span_of([1], [2, 3], 0)]

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        self.installed.append((refresh.draft_version, force))
        return await super().install(refresh, force)

    async def stats(self, policy_version: int) -> RolloutStats:
        self.calls.append("stats")
        return RolloutStats(policy_version, 0, 0, 0.0, interrupted=self.cut_short)

    async def spans(self) -> list[Span]:
        self.calls.append("spans")
        return self.said


def lagging(engines: Engines, overlaps: bool = True, **options: Any) -> SpecRun:
    session = SpecSession(
        SpecConfig(self_test=False, serve="always", **options), TARGET, create_manager(load_entry_points=False)
    )
    return run_of(session, engines, overlaps=overlaps)


def test_a_phase_that_overlaps_with_training_ends_at_the_next_weight_sync():
    engines = Lagging()
    control = lagging(engines)
    synced(control, sync(0))
    asyncio.run(control.rollouts_begin())
    asyncio.run(control.rollouts_end())
    assert "stats" not in engines.calls
    trained(control, 0)
    synced(control, sync(1))
    assert engines.calls.index("stats") < len(engines.calls) - 1 and engines.calls[-1] == "install"
    assert control.policy_version == 1


def test_what_was_said_before_is_kept_once_something_has_been_cut_short():
    engines = Lagging(cut_short=True)
    control = lagging(engines, overlaps=False)

    def versions() -> list[list[int]]:
        found, *_ = spans_of(control).of([torch.tensor([1, 2, 3])], [1], torch.ones(1, 2, dtype=torch.bool))
        return found.tolist()

    synced(control, sync(0))
    asyncio.run(control.rollouts_begin())
    assert not control.lags and versions() == [[0, 0]]
    engines.said = []
    assert versions() == [[-1, -1]], "in a synchronous run nothing is older than the phase"
    engines.said = [span_of([1], [2, 3], 0)]
    asyncio.run(control.rollouts_end())
    assert control.lags and versions() == [[0, 0]]
    engines.said = []
    assert versions() == [[0, 0]]


def test_engines_that_failed_are_not_asked_again_in_a_synchronous_run():
    engines = Lagging()
    control = lagging(engines, overlaps=False)
    control.session.fail(Reason.REFRESH, "planted")
    spans_of(control)
    assert "spans" not in engines.calls
    spans_of(control, told=False)
    assert "spans" in engines.calls, "nobody else says by which version a token was sampled"


def test_law_3_where_the_trainer_does_not_say_it_text_that_is_older_than_the_phase_is_known_to_be():
    engines = Lagging()
    control = lagging(engines, overlaps=False)
    synced(control, sync(0))
    for said in (engines.said, []):
        engines.said = said
        found, *_ = spans_of(control, told=False).of([torch.tensor([1, 2, 3])], [1], torch.ones(1, 2, dtype=torch.bool))
        assert found.tolist() == [[0, 0]]


def test_law_6_engines_that_do_not_say_what_they_sampled_cost_speculation_only():
    class Silent(Lagging):
        async def spans(self) -> list[Span]:
            raise RuntimeError("no answer")

    control = lagging(Silent())
    synced(control, sync(0))
    spans_of(control)
    assert "no answer" in (control.session.failure or "")


def test_law_6_a_self_test_without_an_answer_costs_speculation_only():
    class Silent(Engines):
        async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
            raise RuntimeError("no answer")

    session = SpecSession(SpecConfig(), TARGET, create_manager(load_entry_points=False))
    control = run_of(session, Silent())
    synced(control, sync(0))
    asyncio.run(control.rollouts_begin())
    assert "no answer" in (session.failure or "") and not control.session.speculating


def test_law_6_a_decoder_that_is_called_in_another_way_costs_the_harvest_and_not_the_forward_pass():
    class Odd(torch.nn.Module):
        """Its norm returns two things, and no layer is given the states by position."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(8)])
            self.norm = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm((x, x))[0]

    session = SpecSession(SpecConfig(serve="never"), TARGET, create_manager(load_entry_points=False))
    control, decoder = run_of(session, Engines()), Odd()
    harvest = DecoderHarvest(control, lambda: decoder)
    harvest.open()
    with harvest.capture(lambda: ([torch.zeros(3, dtype=torch.int64)], [torch.ones(3, dtype=torch.bool)])):
        out = decoder(torch.ones(1, 3, 2))
    assert out.shape == (1, 3, 2) and "could not read their states" in (session.failure or "")


def test_law_6_a_model_without_layers_costs_the_harvest_only():
    session = SpecSession(SpecConfig(serve="never"), TARGET, create_manager(load_entry_points=False))
    harvest = DecoderHarvest(run_of(session, Engines()), lambda: torch.nn.Linear(1, 1))
    harvest.open()
    with harvest.capture(lambda: ([], [])):
        pass
    assert "harvest" in (session.failure or "")


def test_what_the_trainer_raises_in_its_forward_pass_is_the_trainers():
    session = SpecSession(SpecConfig(serve="never"), TARGET, create_manager(load_entry_points=False))
    decoder = torch.nn.Module()
    decoder.layers, decoder.norm = torch.nn.ModuleList([torch.nn.Identity() for _ in range(8)]), torch.nn.Identity()
    harvest = DecoderHarvest(run_of(session, Engines()), lambda: decoder)
    harvest.open()
    with pytest.raises(ZeroDivisionError), harvest.capture(lambda: ([], [])):
        raise ZeroDivisionError
    assert not session.failed and not decoder.norm._forward_hooks
