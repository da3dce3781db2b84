"""Engines in the ranks' own processes: who does what when, on two gloo processes; and the trainer's random streams."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders.ranks import on_two_ranks
from builders.training import TARGET, hidden, sync

from draft_training import digest
from spec_plugin import SpecConfig
from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.rollouts import Rollout
from spec_plugin.api.spans import FORGOTTEN
from spec_plugin.lifecycle.blocking import run_blocking
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.rank_engines import RanksLink, random_streams_kept
from spec_plugin.trainer.spec_run import SpecRun


class Engine:
    """With the methods of ``SpecEngineMethods``; knows which thread did what."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.installed: list[tuple[int, str]] = []
        self.remembered: list[Rollout] = []

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)
        random.random(), np.random.rand(), torch.rand(1)

    async def spec_refresh(self, refresh: DraftRefresh, force: bool, hold: bool = False) -> RefreshReport:
        self._note("refresh")
        assert digest(refresh.tensors) == refresh.digest
        self.installed.append((refresh.draft_version, refresh.digest))
        return RefreshReport(True, refresh.draft_version, refresh.digest, 1.0)

    async def spec_settle(self, keep: bool) -> None:
        self._note(f"settle {keep}")

    async def spec_set_schedule(self, schedule: Any) -> EngineSchedule:
        self._note("schedule")
        return EngineSchedule(schedule)

    async def spec_self_test(self, seconds: float, engines: int, part: Any) -> SelfTestReport:
        self._note("self-test")
        return SelfTestReport((), 0.0)

    async def spec_start_phase(self, policy_version: int) -> None:
        self._note("phase")

    async def spec_stats(self, policy_version: int) -> RolloutStats:
        self._note("stats")
        return RolloutStats(policy_version, 1, 10 * (self.rank + 1), 1.0 + self.rank, 0, 0, 0, ())

    async def spec_take_rollouts(self, most_tokens: int, more: bool) -> list[Rollout]:
        self._note("rollouts")
        return [] if more else [Rollout(bytes([self.rank, 0, 0, 0]), b"")]

    async def spec_remember(self, parts: list[list[Rollout]], own: int) -> None:
        self.remembered += [r for i, part in enumerate(parts) if i != own for r in part]

    async def spec_take_spans(self) -> list[Any]:
        self._note("spans")
        return [FORGOTTEN]

    async def spec_state(self, moment: str) -> EngineState:
        return EngineState(moment, 0, 0, "", "")


def session_of(group: Any = None) -> SpecSession:
    from dataclasses import replace

    config = SpecConfig(serve="always", audit=True, train_max_steps=1, self_test=True)
    return SpecSession(config, replace(TARGET, actor_group=group))


def responses() -> tuple[Responses, torch.Tensor]:
    documents = [torch.arange(6), torch.arange(1, 7)]
    mask = torch.ones(2, 4, dtype=torch.bool)
    stated = torch.full((2, 4), -1.0)
    return Responses(documents, [2, 2], mask, stated), stated.clone()


def a_step(run: SpecRun, version: int) -> None:
    event = sync(version)
    run_blocking(run.weights_synced(version, event.embed, event.lm_head))
    with run.logprob_pass():
        run.session.target_forward(hidden(torch.arange(40), version))
    run.check(*responses())
    run.policy_updated(version)


def test_each_rank_installs_the_draft_that_it_has_trained_itself_and_serves_only_while_all_are_at_it(
    tmp_path: Any,
) -> None:
    def work(rank: int) -> Any:
        from spec_plugin.api.ranks import actor_group

        engine = Engine(rank)
        group = actor_group()
        link = RanksLink(engine, 60.0)
        run = SpecRun(session_of(group), link, NoHarvest)
        for version in range(4):
            if rank:
                time.sleep(0.05)  # the first rank calls before this one has come
            a_step(run, version)
        idle = [t.name for t in threading.enumerate() if t.name == "spec-plugin-engine"]
        return engine.installed, engine.calls, engine.threads, idle, run.session.failure, run.metrics()

    first, other = found = on_two_ranks(tmp_path, work)
    assert not [answer for answer in found if isinstance(answer, Exception)], found
    assert first[4] is None and other[4] is None
    assert first[0] == other[0] and len(first[0]) == 4 and len({d for _, d in first[0]}) > 1
    assert first[1] == other[1]
    assert first[2] == {"MainThread"} and other[2] == {"spec-plugin-engine"} and not first[3] + other[3]
    assert first[5]["spec/refresh_refused"] == 0 and not other[5]


class NoHarvest:
    """A harvest of a backend's own, which captures nothing."""

    def __init__(self, run: SpecRun) -> None:
        self.run = run

    def open(self) -> None:
        self.run.agree()

    def close(self) -> None: ...

    def deliver(self) -> None: ...


def test_a_rank_with_another_draft_refuses_it_and_no_engine_keeps_it(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        engine = Engine(rank)
        link = RanksLink(engine, 60.0)
        reports = []
        for version, same in ((1, True), (2, False), (3, False), (4, True)):
            mine = {"w": torch.full((2,), float(version + (0 if same else rank)))}
            refresh = DraftRefresh(version, version, mine, digest(mine))
            link.on_local_draft(version, refresh)
            with link.serving():
                if rank == 0:
                    report = asyncio.run(link.install(refresh, force=False))
                    reports.append((report.installed, report.draft_version, report.reason))
        return reports, engine.calls, [version for version, _ in engine.installed], link._serves[0]

    (reports, calls, _, serves), (_, _, installed, other) = on_two_ranks(tmp_path, work)
    assert [report[:2] for report in reports] == [(True, 1), (False, 1), (False, 1), (True, 4)]
    assert "rank 1 has another draft than the first rank: version 2" in reports[1][2]
    assert calls.count("settle False") == 2 and installed == [1, 4]
    assert (serves, other) == (4, 4)


def test_a_first_rank_that_goes_back_says_what_it_serves_then(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        link = RanksLink(Engine(rank), 60.0)
        for version in (1, 2):
            mine = {"w": torch.full((2,), float(version * (1 + rank * (version - 1))))}
            refresh = DraftRefresh(version, version, mine, digest(mine))
            link.on_local_draft(version, refresh)
            with link.serving():
                if rank == 0:
                    asyncio.run(link.install(refresh, force=False))
        return link._serves[0]

    assert on_two_ranks(tmp_path, work) == [1, 1]


def test_a_rank_that_makes_no_draft_in_time_is_an_error_of_the_call_and_not_a_hang(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        link = RanksLink(Engine(rank), 0.2)
        refresh = DraftRefresh(1, 5, {}, digest({}))
        with link.serving():
            if rank == 0:
                with pytest.raises(RuntimeError, match="rank 1 has made no draft for policy version 5"):
                    asyncio.run(link.install(refresh, force=False))
        return "went on"

    assert on_two_ranks(tmp_path, work) == ["went on", "went on"]


def test_what_must_stop_the_run_does_whichever_rank_raises_it(tmp_path: Any) -> None:
    from spec_plugin.api.errors import LosslessError

    class Wrong(Engine):
        async def spec_self_test(self, seconds: float, engines: int, part: Any) -> SelfTestReport:
            raise LosslessError("rank 1 samples something else") if self.rank else ValueError("other trouble")

    def work(rank: int) -> Any:
        link = RanksLink(Wrong(rank), 60.0)
        with link.serving():
            if rank == 0:
                with pytest.raises(LosslessError, match="something else"):
                    asyncio.run(link.self_test(1.0, SelfTestPart.ALL))
        return "went on"

    assert on_two_ranks(tmp_path, work) == ["went on", "went on"]


class OfTwo(Exception):
    """As some libraries', which cannot be unpickled."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


def test_an_error_that_cannot_travel_is_told_with_its_rank_and_the_ranks_go_on_together(tmp_path: Any) -> None:
    from spec_plugin.api.errors import LosslessError

    class Wrong(Engine):
        async def spec_stats(self, policy_version: int) -> RolloutStats:
            if self.rank and policy_version == 1:
                raise OfTwo("trouble", "the engine")
            if self.rank and policy_version == 2:
                raise ValueError("a wrapper") from LosslessError("not the target's")
            return await super().spec_stats(policy_version)

    def work(rank: int) -> Any:
        link = RanksLink(Wrong(rank), 60.0)
        with link.serving():
            if rank == 0:
                with pytest.raises(RuntimeError, match="rank 1: OfTwo: trouble at the engine"):
                    asyncio.run(link.stats(1))
                with pytest.raises(LosslessError, match="not the target's"):
                    asyncio.run(link.stats(2))
        with link.serving():
            return asyncio.run(link.stats(3)).tokens if rank == 0 else None

    assert on_two_ranks(tmp_path, work) == [30, None]


def test_a_version_that_is_sent_once_more_waits_for_the_draft_that_belongs_to_it(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        engine = Engine(rank)
        link = RanksLink(engine, 60.0)
        for draft in (1, 2):
            mine = {"w": torch.full((2,), float(draft))}
            refresh = DraftRefresh(draft, 0, mine, digest(mine))
            with link.serving():
                if rank == 0:
                    assert asyncio.run(link.install(refresh, force=False)).installed
                else:
                    time.sleep(0.2)  # still at it when the first rank calls
                    link.on_local_draft(0, refresh)
        return [version for version, _ in engine.installed]

    assert on_two_ranks(tmp_path, work) == [[1, 2], [1, 2]]


def test_answers_of_all_ranks_are_merged_and_each_is_told_what_the_others_sampled(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        engine = Engine(rank)
        link = RanksLink(engine, 60.0)
        found = None
        with link.serving():
            if rank == 0:
                stats = asyncio.run(link.stats(3))
                found = stats.tokens, stats.seconds, len(asyncio.run(link.share_rollouts(1000)))
            dist.barrier()  # the trainer's own call, which the first rank makes behind its engine's
        return found, [r.prompt[:1] for r in engine.remembered]

    assert on_two_ranks(tmp_path, work) == [((30, 2.0, 2), [b"\1"]), (None, [b"\0"])]


def test_a_failure_in_the_block_lets_the_other_ranks_go_on(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        link = RanksLink(Engine(rank), 60.0)
        with pytest.raises(KeyError), link.serving():
            raise KeyError(rank)
        with link.serving():
            return asyncio.run(link.stats(1)).tokens if rank == 0 else None

    assert on_two_ranks(tmp_path, work) == [30, None]


def test_a_single_rank_needs_no_group_and_its_engine_draws_nothing_of_the_trainers() -> None:
    link = RanksLink(Engine(), 60.0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with link.serving():
        assert asyncio.run(link.stats(1)).tokens == 10
    assert [random.random(), float(np.random.rand()), float(torch.rand(1))] == expected


def test_random_streams_are_kept_where_the_block_fails_too() -> None:
    random.seed(2), torch.manual_seed(2)
    expected = random.random(), float(torch.rand(1))
    random.seed(2), torch.manual_seed(2)
    with pytest.raises(ValueError), random_streams_kept():
        random.random(), torch.rand(3)
        raise ValueError
    assert (random.random(), float(torch.rand(1))) == expected


def test_a_refresh_that_an_engine_could_not_do_is_taken_back_to_the_draft_before_it(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        engine = Engine(rank)
        link = RanksLink(engine, 60.0)
        for version in (1, 2, 3):
            mine = {"w": torch.full((2,), float(version))}
            refresh = DraftRefresh(version, version, mine, digest(mine))
            link.on_local_draft(version, refresh)
            if version == 3:
                engine.spec_refresh = broken  # type: ignore[method-assign]
            with link.serving():
                if rank == 0:
                    with suppress(RuntimeError):
                        asyncio.run(link.install(refresh, force=False))
                    if version == 3:
                        asyncio.run(link.call_all("spec_settle", False))
        return link._serves[0]

    async def broken(refresh: DraftRefresh, force: bool, hold: bool = False) -> RefreshReport:
        raise RuntimeError("the worker said no")

    assert on_two_ranks(tmp_path, work) == [2, 2]
