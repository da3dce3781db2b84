"""The harvest of a phase is bounded: its budget of tokens, who shares it, and when nothing is captured at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.spec_run import run_of
from builders.training import LAYERS, TARGET
from torch import Tensor, nn

from spec_plugin import SpecConfig
from spec_plugin.api.events import HiddenStates
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.harvest import DecoderHarvest, PackedShards, RolloutHarvest
from spec_plugin.trainer.spec_run import SpecRun

BUDGET = 32


class Heard:
    """A plugin that notes the lengths of what was harvested."""

    def __init__(self) -> None:
        self.lengths: list[tuple[int, ...]] = []

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        self.lengths.append(hidden.lengths)


class Shards(PackedShards):
    """Two ranks that see whole rows each."""

    def __init__(self) -> None:
        self.rank, self.size, self.gathered = 0, 2, 0
        self.group: Any = None

    def whole(self, part: Tensor) -> Tensor:
        self.gathered += 1
        return part


class Actor:
    """A policy of identities, with the harvest of one process."""

    def __init__(self, shards: Shards | None = None, **options: Any) -> None:
        manager, self.heard = create_manager(["trainer"], load_entry_points=False), Heard()
        manager.register(self.heard)
        options = {"harvest_tokens": BUDGET, "buffer_tokens": 256, **options}
        self.session = SpecSession(SpecConfig(**options), TARGET, manager)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Identity() for _ in range(LAYERS)])
        self.decoder.norm = nn.Identity()
        self.harvest = DecoderHarvest(run_of(self.session, None), lambda: self.decoder, shards)

    def runs(self, *lengths: int) -> None:
        ids = [torch.arange(n) for n in lengths]
        with self.harvest.capture(lambda: (ids, [torch.ones(n, dtype=torch.bool) for n in lengths])):
            states = torch.randn(1, sum(lengths), 4)
            for layer in self.decoder.layers:
                states = layer(states)
            self.decoder.norm(states)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"buffer_tokens": 4096}, [(120,), (8,)]),  # four times the budget
        ({"harvest_tokens": 100}, [(120, 120), (16,)]),  # what the buffer holds
        ({"harvest_tokens": 400}, [(120, 120, 120), (40,)]),  # never less than the budget
    ],
)
def test_the_first_step_fills_the_buffer_and_later_ones_keep_to_their_budget(options, lengths):
    actor = Actor(**options)
    actor.harvest.open()
    for documents in ((120, 120, 120), (120,), (40,), (16,), (8,)):
        actor.runs(*documents)
    assert actor.heard.lengths == lengths
    budget = options.get("harvest_tokens", BUDGET)
    actor.harvest.open()
    for _ in range(40):
        actor.runs(BUDGET, BUDGET)
    assert budget / 2 <= sum(map(sum, actor.heard.lengths[len(lengths) :])) <= budget


def test_the_first_step_keeps_within_the_bytes_of_the_buffer():
    actor = Actor(buffer_mb=1, buffer_tokens=1 << 30, harvest_tokens=1000)
    itemsize = max(getattr(torch, dtype).itemsize for dtype in (TARGET.dtype, TARGET.actor_dtype))
    most = (1 << 20) // (itemsize * actor.session.method.draft.config.hidden_size * (len(actor.harvest._wanted) + 1))
    actor.harvest.open()
    assert actor.harvest.plan.left == most and 1000 < most < 4000


def test_what_was_harvested_is_taken_off_the_budget_of_the_phase():
    actor = Actor()
    actor.harvest.open()
    for lengths in ((50, 50), (50,)):
        actor.runs(*lengths)
    assert actor.heard.lengths == [(50, 50)] and actor.harvest.plan.left == 28, "too few to be worth a place"
    assert not actor.session.failed


def test_tokens_that_find_no_room_count_for_the_next_step():
    actor = Actor(train_tokens=64, harvest_tokens=128)
    for step in range(8):
        actor.harvest.open()
        for _ in range(10):
            actor.runs(160)
        assert actor.harvest.plan.passed == 1600
        if step:
            assert len(actor.heard.lengths) <= 4 and 64 <= sum(map(sum, actor.heard.lengths)) <= 128, (
                "two teeth of a comb"
            )
        actor.heard.lengths.clear()
        actor.harvest.close()


def test_ranks_that_share_their_documents_share_their_budgets():
    actor = Actor(Shards())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutHarvest, "_held_at_most", lambda self: 0)
        actor.harvest.open()
    actor.runs(20, 20, 24)
    assert actor.heard.lengths == [(20, 24)] and actor.harvest.plan.left == 0, (
        "three documents fit two budgets, and every second one is the other rank's"
    )


@pytest.mark.parametrize("how", ["never opened", "closed", "nothing is trained"])
def test_nothing_is_harvested_while_the_harvest_is_shut(how):
    actor = Actor(train=how != "nothing is trained")
    if how != "never opened":
        actor.harvest.open()
    if how == "closed":
        actor.harvest.close()
    actor.runs(12)
    assert actor.heard.lengths == [] and not actor.session.failed


@pytest.mark.parametrize("why", ["hidden", "hopeless"])
def test_nobody_harvests_where_drafts_would_be_of_no_use(why, monkeypatch):
    actor = Actor()
    monkeypatch.setattr(SpecRun, "agree", lambda run: None)
    for idle, lengths in ((True, []), (False, [(12,)])):
        setattr(actor.session, why, idle)
        actor.harvest.open()
        actor.runs(12)
        assert actor.heard.lengths == lengths


def test_law_6_nobody_harvests_for_a_draft_that_has_failed():
    shards = Shards()
    actor = Actor(shards)
    actor.session.fail(Reason.HARVEST, "on purpose")
    actor.harvest.open()
    actor.runs(12)
    assert actor.heard.lengths == [] and shards.gathered == 0


def held(actor: Actor) -> bool:
    assert actor.harvest._taps is not None
    return bool(actor.harvest._taps._seen)


@pytest.mark.parametrize("fails", ["the pass", "the documents", "nothing"])
def test_no_hidden_states_stay_on_the_card_whatever_fails(fails):
    actor = Actor()
    actor.harvest.open()

    def documents() -> Any:
        if fails == "the documents":
            raise KeyError("no mask")
        return [torch.arange(8)], [torch.ones(8, dtype=torch.bool)]

    try:
        with actor.harvest.capture(documents):
            states = torch.randn(1, 8, 4)
            for layer in actor.decoder.layers:
                states = layer(states)
            actor.decoder.norm(states)
            if fails == "the pass":
                raise MemoryError("in the head")
    except MemoryError:
        pass
    assert not held(actor)
    assert actor.session.failed == (fails == "the documents")


def test_law_6_behind_a_failure_the_pass_goes_on_and_nothing_more_is_captured():
    """In the next micro-batch of the same step, of a single rank."""
    actor = Actor()
    actor.harvest.open()
    actor.session.fail(Reason.HARVEST, "on purpose")
    hooks: list[int] = []
    with actor.harvest.capture(lambda: ([], [])):
        hooks.append(len(actor.decoder.norm._forward_hooks))
    assert hooks == [0]


def test_a_harvest_that_could_not_be_made_is_made_anew_behind_a_fresh_start():
    actor = Actor()
    made = iter([ValueError("no decoder"), actor.decoder])

    def decoder() -> nn.Module:
        found = next(made)
        if isinstance(found, Exception):
            raise found
        return found

    harvest = DecoderHarvest(run_of(actor.session, None), decoder)
    assert actor.session.failed
    harvest.open()
    assert harvest.plan.left == 0
    actor.session.failure = None
    harvest.open()
    assert harvest.plan.left == 4 * BUDGET, "its first budget"


def test_law_6_a_harvest_that_fails_costs_speculation_and_not_the_pass():
    actor = Actor()
    actor.harvest.open()
    with actor.harvest.capture(lambda: ([torch.arange(8)], [torch.ones(8, dtype=torch.bool)])):
        pass
    assert "no hidden states were captured" in (actor.session.failure or "")
