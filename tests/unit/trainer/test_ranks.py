"""What actor ranks agree on, on two gloo processes; and the link's all or nothing over several engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders.ranks import on_two_ranks
from builders.spec_run import run_of, synced, trained
from builders.training import TARGET, hidden, sync

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, OtherRankFailed, TrainSettings, digest
from spec_plugin import SpecConfig
from spec_plugin.api import ranks as ranks_module
from spec_plugin.api import rollouts
from spec_plugin.api.errors import PatchError
from spec_plugin.api.events import DraftRefresh, EngineState, RefreshReport, RolloutStats, SelfTestPart, SelfTestReport
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.ranks import actor_group, is_first, on_any_rank, together
from spec_plugin.api.rollouts import Rollout
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle import registry as builtins
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer import links
from spec_plugin.trainer.harvest import DecoderHarvest, PackedShards, harvested
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.links import ActorsLink, merge_states, merge_stats
from spec_plugin.trainer.taps import Taps

assert builtins  # imported once here, not in each forked rank


def test_flags_are_set_if_they_are_on_any_rank(tmp_path):
    found = on_two_ranks(tmp_path, lambda rank: (on_any_rank(rank == 1, False, True), is_first()))
    assert found == [((True, False, True), True), ((True, False, True), False)]
    assert on_any_rank(True, False) == (True, False) and is_first()  # alone


def test_a_block_that_fails_on_one_rank_stops_both(tmp_path):
    def work(rank: int) -> str:
        with together("do this"):
            pass
        try:
            with together("do that"):
                if rank == 1:
                    raise KeyError("here")
        except Exception as error:
            return type(error).__name__
        return "went on"

    assert on_two_ranks(tmp_path, work) == ["OtherRankFailed", "KeyError"]


class Broken:
    """A third party's plugin that raises in one hook on one rank, once."""

    def __init__(self, hook: str, rank: int) -> None:
        self._armed = dist.get_rank() == rank
        self._hook = hook

    def _at(self, hook: str) -> float:
        if self._armed and hook == self._hook:
            self._armed = False
            raise RuntimeError("planted")
        return 0.0

    @hookimpl
    def spec_head_start(self) -> float:
        return self._at("spec_head_start")

    @hookimpl
    def spec_train_draft(self) -> None:
        self._at("spec_train_draft")

    @hookimpl
    def spec_recover(self) -> None:
        self._at("spec_recover")

    @hookimpl
    def spec_weight_sync(self) -> None:
        self._at("spec_weight_sync")

    @hookimpl
    def spec_target_forward(self) -> None:
        self._at("spec_target_forward")


def three_steps(rank: int, hook: str, where: int) -> list[Any]:
    """Trainer steps of both ranks; after each, has speculation failed here, is it for another rank's sake, which draft."""
    target = replace(TARGET, actor_group=dist.group.WORLD)
    session = SpecSession(SpecConfig(train_max_steps=2), target)
    session.manager.unregister(name="controller")
    session.manager.register(Broken(hook, where), name="controller")
    control = run_of(session, None)
    out = []
    for version in range(3):
        synced(control, sync(version))
        control.agree()
        session.target_forward(hidden(torch.arange(20) + 20 * rank, version))
        session.ledger.plain_s = 60.0 * (rank == 0)  # only the rank with the link knows
        trained(control, version)
        (trainer,) = [p for p in session.manager.get_plugins() if type(p).__name__ == "DraftTraining"]
        out.append((session.failed, session.follows, trainer._trainer.draft_version if trainer._trainer else -1))
    return out


CASES = [
    (hook, rank)
    for hook in ("spec_head_start", "spec_train_draft", "spec_weight_sync", "spec_target_forward")
    for rank in (0, 1)
]


def test_law_6_a_plugin_that_fails_on_one_rank_ends_speculation_on_both_and_nobody_waits(tmp_path):
    def work(rank: int) -> list[Any]:
        return [three_steps(rank, *case) for case in (*CASES, ("none", 0))]

    *failing, healthy = zip(*on_two_ranks(tmp_path, work), strict=True)
    for (_, where), (first, second) in zip(CASES, failing, strict=True):
        assert [step[0] for step in first] == [step[0] for step in second] == [True] * 3
        assert [rank[-1][1] for rank in (first, second)] == [where != 0, where != 1]
        assert [step[2] for step in first] == [step[2] for step in second]  # one draft
    assert healthy[0] == healthy[1] == [(False, False, 2), (False, False, 4), (False, False, 6)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_resumed_draft_is_the_first_ranks_although_the_other_one_has_no_folder(tmp_path, torn):
    here, nowhere = tmp_path / "here", tmp_path / "nowhere"

    def session_of(rank: int) -> tuple[SpecSession, Any]:
        session = SpecSession(SpecConfig(train_max_steps=2), replace(TARGET, actor_group=dist.group.WORLD))
        (training,) = [p for p in session.manager.get_plugins() if type(p).__name__ == "DraftTraining"]
        return session, training

    def step(session: SpecSession, rank: int, version: int) -> None:
        session.weight_sync(sync(version))
        session.target_forward(hidden(torch.arange(20) + 20 * rank, version))
        session.train_draft(version, 60.0)

    def work(rank: int) -> list[Any]:
        first, training = session_of(rank)
        step(first, rank, 0)
        if rank == 0:
            first.save(here)
            if torn:
                (here / "draft" / "trainer.json").unlink()
        dist.barrier()
        second, resumed = session_of(rank)
        second.load(here if rank == 0 else nowhere)
        step(second, rank, 0)
        state = resumed._trainer._optimizer.state() if resumed._trainer else {}
        moments = {name: float(value.sum()) for name, value in state.items()}
        drafts = [digest(t._trainer.engine_tensors()) for t in (training, resumed) if t._trainer]
        return [second.failed, resumed._trainer and resumed._trainer.draft_version, drafts, moments]

    first, second = on_two_ranks(tmp_path, work)
    assert first == second
    assert first[:2] == ([True, None] if torn else [False, 4])


def test_what_a_rank_cannot_do_alone_is_raised_on_the_other_one_too(tmp_path):
    def work(rank: int) -> list[str]:
        trainer = DraftTrainer(
            DraftConfig.from_target(TARGET.hf_config),
            TrainSettings(),
            device="cpu",
            seed=0,
            process_group=dist.group.WORLD,
        )
        event = sync()
        trainer.update_policy(event.embed, event.lm_head, 0)  # type: ignore[arg-type]
        buffer = HiddenBuffer(1000, 1 << 30, 0)
        if rank == 1:
            buffer.sample = lambda *_: (_ for _ in ()).throw(MemoryError("no memory left"))  # type: ignore[method-assign]
        try:
            trainer.train_slice(buffer, 60.0, 2)
        except Exception as error:
            return [type(error).__name__, str(error)]
        return ["went on"]

    first, second = on_two_ranks(tmp_path, work)
    assert first[0] == "OtherRankFailed" and second == ["MemoryError", "no memory left"]
    assert issubclass(OtherRankFailed, RuntimeError)


def test_slices_of_a_packed_row_become_whole_documents_of_which_each_rank_keeps_its_own(tmp_path):
    lengths, states = [5, 4, 6], torch.arange(16 * 3.0).view(1, 16, 3)  # 15 tokens and one of padding
    ids = [torch.arange(n) + 10 * n for n in lengths]

    def work(rank: int) -> Any:
        layer, norm = torch.nn.Identity(), torch.nn.Identity()
        decoder = torch.nn.Module()
        decoder.layers, decoder.norm = torch.nn.ModuleList([layer]), norm
        taps, plan = Taps.of(decoder, [0]), HarvestPlan(8, ranks=2)
        with taps.attached():
            norm(layer(states[:, rank * 8 : rank * 8 + 8]) + 1)
        found = harvested(taps, (ids, [torch.ones(n) for n in lengths]), plan, 0, PackedShards(dist.group.WORLD))
        assert found is not None and plan.left == 1
        return found.lengths, found.input_ids.tolist(), found.aux.tolist(), found.last.tolist()

    first, second = on_two_ranks(tmp_path, work)
    rows = states[0, :15].tolist()
    assert first[0] == (5, 6) and second[0] == (4,)
    assert first[2] == rows[:5] + rows[9:] and second[2] == rows[5:9]
    assert first[3] == [[x + 1 for x in row] for row in first[2]]
    assert second[1] == ids[1].tolist()


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("what", ["documents", "hook"])
def test_law_6_a_rank_that_fails_before_the_exchange_of_rows_leaves_no_other_waiting(tmp_path, where, what):
    """Ulysses: each rank has a part of each row; one of them cannot say which documents they are, or has captured nothing."""

    def work(rank: int) -> Any:
        layer, norm = torch.nn.Identity(), torch.nn.Identity()
        decoder = torch.nn.Module()
        decoder.layers, decoder.norm = torch.nn.ModuleList([layer]), norm
        session = SpecSession(SpecConfig(), replace(TARGET, actor_group=dist.group.WORLD))
        session.method = replace(session.method, harvest=(0,))
        control = run_of(session, None)
        harvest = DecoderHarvest(control, lambda: decoder, PackedShards(dist.group.WORLD))
        harvest.open()
        broken = rank == where

        def documents() -> Any:
            if broken and what == "documents":
                raise KeyError("no mask")
            return [torch.arange(6)], [torch.ones(6)]

        left = []
        for _ in range(2):  # micro-batches of one step
            with harvest.capture(documents):
                states = torch.ones(1, 3, 4)
                norm(states if broken and what == "hook" else layer(states))
            left.append(harvest.plan.left)
        held = bool(harvest._taps._seen)
        return session.failed, session.follows, left, held

    found = on_two_ranks(tmp_path, work)
    assert [f[0] for f in found] == [True, True] and [f[1] for f in found] == [rank != where for rank in (0, 1)]
    assert found[0][2] == found[1][2], "what is left of the budget is the same on both"
    assert not found[0][3] and not found[1][3]


def test_what_is_agreed_in_a_thread_does_not_meet_the_trainers_own_calls(tmp_path):
    """In another order on each rank, as a thread beside the trainer may come to it."""

    def work(rank: int) -> Any:
        actor_group()
        found: list[Any] = []

        def beside() -> None:
            time.sleep(0.5 * (rank == 0))
            found.append(on_any_rank(rank == 0, False))

        thread = threading.Thread(target=beside)
        thread.start()
        time.sleep(0.5 * (rank == 1))
        numbers = torch.full((3,), 1.0 + rank)
        dist.all_reduce(numbers)
        thread.join()
        return found, numbers.tolist()

    assert on_two_ranks(tmp_path, work) == [([(True, False)], [3.0] * 3)] * 2


def test_law_6_a_rank_that_does_not_come_is_given_up_in_our_own_time(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module, "LIMIT_S", 2.0)

    def work(rank: int) -> Any:
        session = SpecSession(SpecConfig(), replace(TARGET, actor_group=actor_group()))
        control = run_of(session, None)
        control.agree()
        if rank == 1:
            time.sleep(6.0)
            return None
        began = time.monotonic()
        for _ in range(5):
            control.agree()
        return session.failed, time.monotonic() - began < 5.0, session.failure, session._recovery.left

    (failed, soon, why, left), _ = on_two_ranks(tmp_path, work)
    assert failed and soon and "did not join a collective call within 2 s" in why and left is None


def test_ranks_begin_anew_together_whoever_took_the_failure_back(tmp_path):
    """In an asynchronous run a phase ends within the sync: the rank that had failed comes to it healed, the others do not."""

    def work(rank: int) -> Any:
        session = SpecSession(SpecConfig(), replace(TARGET, actor_group=actor_group()))
        control = run_of(session, None)
        if rank == 0:
            session.fail(Reason.OTHER_TROUBLE, RuntimeError("broken"))
        control.agree()
        before = session.failed
        if rank == 0:
            session.failure = None
        synced(control, sync())
        return before, session.failed, session.recovering, session.failure

    assert on_two_ranks(tmp_path, work) == [(True, False, True, None)] * 2


class Method:
    """``actor.method.remote(…)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def _call(self, *args: Any) -> Any:
        return self._function(*args)

    def remote(self, *args: Any) -> Any:
        return self._call(*args)


class Engine:
    """A replica that keeps a version, and goes back when it is told to."""

    def __init__(self, refuses: bool = False) -> None:
        self.version, self._before, self._refuses = 1, 1, refuses
        self.held: list[bool] = []
        self.spec_refresh, self.spec_settle = Method(self._refresh), Method(self._settle)

    def _refresh(self, refresh: DraftRefresh, force: bool, hold: bool) -> RefreshReport:
        self.held.append(hold)
        self._before = self.version
        if not self._refuses:
            self.version = refresh.draft_version
        return RefreshReport(not self._refuses, self.version, "digest", 1.0, "no memory" if self._refuses else "")

    def _settle(self, keep: bool) -> None:
        self.version = self.version if keep else self._before


@pytest.mark.parametrize(("refusing", "left"), [((), 2), ((1,), 1), ((0, 1), 1)])
def test_law_5_a_draft_that_one_replica_refuses_is_taken_back_by_all(refusing, left):
    engines = [Engine(i in refusing) for i in range(3)]
    report = asyncio.run(ActorsLink(engines, 5.0).install(DraftRefresh(2, 1, {}, "digest", None), force=False))
    assert [e.version for e in engines] == [left] * 3 and all(e.held == [True] for e in engines)
    assert report.installed == (not refusing)
    assert report.reason == "; ".join(f"engine {i}: no memory" for i in refusing)


@pytest.mark.parametrize("error", [OSError("gone"), PatchError("another vLLM")])
@pytest.mark.parametrize("settles", [True, False])
def test_law_5_where_one_replica_raises_the_others_go_back(error, settles):
    def broken(*_: Any) -> None:
        raise error

    engines = [Engine() for _ in range(3)]
    engines[1].spec_refresh = Method(broken)
    if not settles:
        engines[2].spec_settle = Method(lambda keep: time.sleep("nonsense"))  # type: ignore[arg-type]
    with pytest.raises(type(error), match=str(error)):  # and what must stop the run is heard
        asyncio.run(ActorsLink(engines, 5.0).install(DraftRefresh(2, 1, {}, "digest", None), force=False))
    assert [e.version for e in engines] == [1, 1, 1 if settles else 2]


def test_a_single_engine_holds_nothing_back():
    engine = Engine()
    asyncio.run(ActorsLink([engine], 5.0).install(DraftRefresh(2, 1, {}, "digest", None), force=False))
    assert engine.held == [False] and engine.version == 2


def test_all_engines_of_a_run_share_the_chance_of_a_false_alarm() -> None:
    told: list[tuple[float, int, SelfTestPart]] = []

    class Engine:
        class spec_self_test:
            @staticmethod
            async def remote(seconds: float, engines: int, part: SelfTestPart) -> SelfTestReport:
                told.append((seconds, engines, part))
                return SelfTestReport((), 1.0)

    asyncio.run(ActorsLink([Engine(), Engine(), Engine()], 5.0).self_test(30.0, SelfTestPart.START))
    assert told == [(30.0, 3, SelfTestPart.START)] * 3


def rollout(i: int, tokens: int = 1) -> Rollout:
    return Rollout(bytes([i, 0, 0, 0]), bytes(4 * (tokens - 1)))


class Sampled:
    """An engine that has sampled this, and the largest answer that it gave and call that it got, in tokens."""

    def __init__(self, sampled: list[Rollout]) -> None:
        self.told: list[Rollout] = []
        self.left, self.largest, self.calls = list(sampled), 0, 0
        self.spec_take_rollouts, self.spec_remember = Method(self.take), Method(self.remember)

    def take(self, most_tokens: int, more: bool) -> list[Rollout]:
        assert more == (self.calls > 0)
        self.calls += 1
        taken: list[Rollout] = []
        while self.left and (not taken or sum(r.tokens for r in (*taken, self.left[0])) <= most_tokens):
            taken.append(self.left.pop(0))
        self._note(taken)
        return taken

    def remember(self, parts: list[list[Rollout]], own: int | None) -> None:
        self._note([r for part in parts for r in part])
        self.told += [r for i, part in enumerate(parts) if i != own for r in part]

    def _note(self, rollouts: list[Rollout]) -> None:
        self.largest = max(self.largest, sum(r.tokens for r in rollouts))


def test_each_engine_is_told_what_the_others_sampled() -> None:
    engines = [Sampled([rollout(0), rollout(1)]), Sampled([]), Sampled([rollout(2)])]
    link = ActorsLink(engines, 5.0)
    assert asyncio.run(link.share_rollouts(100)) == [rollout(0), rollout(1), rollout(2)]
    assert [e.told for e in engines] == [[rollout(2)], [rollout(0), rollout(1), rollout(2)], [rollout(0), rollout(1)]]
    asyncio.run(link.remember([rollout(9)]))
    assert all(e.told[-1] == rollout(9) for e in engines)


def test_one_engine_may_give_all_that_there_is_room_for() -> None:
    engines = [Sampled([rollout(i) for i in range(90)]), Sampled([]), Sampled([rollout(100)])]
    assert len(asyncio.run(ActorsLink(engines, 5.0).share_rollouts(100))) == 91
    assert max(engine.calls for engine in engines) <= 4


@pytest.mark.parametrize("most", [60, 100])
def test_no_more_travels_than_one_engine_keeps_and_each_gives_its_share(most: int) -> None:
    engines = [Sampled([rollout(i, 5) for _ in range(50)]) for i in range(4)]
    shared = asyncio.run(ActorsLink(engines, 5.0).share_rollouts(most))
    assert sum(r.tokens for r in shared) == most
    assert all(sum(r.tokens for r in shared if r.prompt[0] == i) == most / 4 for i in range(4))
    assert max(engine.calls for engine in engines) <= 2


def test_what_is_too_long_for_all_that_is_left_ends_the_taking() -> None:
    engines = [Sampled([rollout(i, 30) for _ in range(50)]) for i in range(4)]
    assert asyncio.run(ActorsLink(engines, 5.0).share_rollouts(20)) == [] and engines[0].calls == 1


def test_rollouts_travel_in_calls_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CHUNK_TOKENS", 20)
    monkeypatch.setattr(links, "chunks", partial(rollouts.chunks, most_tokens=20))
    engines = [Sampled([rollout(i, 5) for _ in range(30)]) for i in range(3)]
    link = ActorsLink(engines, 5.0)
    shared = asyncio.run(link.share_rollouts(450))
    assert len(shared) == 90 and [len(engine.told) for engine in engines] == [60] * 3
    asyncio.run(link.remember(shared))
    assert [len(engine.told) for engine in engines] == [150] * 3 and max(engine.largest for engine in engines) == 20


def test_the_shadows_of_several_engines_add_up() -> None:
    parts = [
        RolloutStats(0, 1, 9, 1.0, shadow_rounds=10, shadow_per_pos=(5, 2)),
        RolloutStats(0, 1, 9, 1.0),
        RolloutStats(0, 1, 9, 1.0, shadow_rounds=20, shadow_per_pos=(6, 1)),
    ]
    merged = merge_stats(parts)
    assert (merged.shadow_rounds, merged.shadow_per_pos) == (30, (11, 3))
    assert merged.shadow_tokens_per_forward == 1 + 14 / 30
    assert parts[1].shadow_tokens_per_forward is None


@pytest.mark.parametrize("cut_short", [True, False])
def test_one_engine_that_was_cut_short_is_enough(cut_short: bool) -> None:
    parts = [RolloutStats(0, 1, 9, 1.0, interrupted=cut_short), RolloutStats(0, 1, 9, 1.0)]
    assert merge_stats(parts).interrupted == cut_short


def test_requests_of_all_engines_that_may_run_add_up_and_are_no_difference_between_them() -> None:
    states = [EngineState("synced", 1, 2, "draft", "target", admitted=n) for n in (0, 3, 4)]
    assert merge_states(states).admitted == 7
    with pytest.raises(RuntimeError, match="the engines differ in"):
        merge_states([*states, EngineState("synced", 1, 2, "another", "target")])


@pytest.mark.parametrize("where", [0, 1])
def test_law_6_a_plugin_that_fails_on_one_rank_where_both_begin_anew_holds_the_other_up_for_nothing(
    tmp_path: Any, where: int
) -> None:
    def work(rank: int) -> Any:
        session = SpecSession(SpecConfig(train_max_steps=2), replace(TARGET, actor_group=dist.group.WORLD))
        session.manager.unregister(name="controller")
        session.manager.register(Broken("spec_recover", where), name="controller")
        synced(run_of(session, None), sync(0))
        session.recover()
        return session.failure, on_any_rank(rank == 1)  # the next thing that both do together

    first, second = on_two_ranks(tmp_path, work)
    assert "planted" in (first, second)[where][0] and "another rank" in (second, first)[where][0]
    assert first[1] == second[1] == (True,)
