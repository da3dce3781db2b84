"""The gate of a standalone engine of verl: shut until the actor has begun the phase, open after that or in the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("verl")
from spec_plugin_verl.gate import Gate
from verl.workers.rollout.replica import RolloutMode

from spec_plugin import LosslessError, SpecConfig, SpecConfigError
from spec_plugin.api.events import EngineSchedule, Schedule, SelfTestReport
from spec_plugin.plan.sources import source_of


class Front:
    """What the gate asks of the engine's front."""

    def __init__(self, timeout: float) -> None:
        self.session = type("Session", (), {"config": SpecConfig(gate_timeout_s=timeout), "target": "target"})()
        self.busy = self.interrupted = False
        self.plain = self.tested = 0
        self.broken: Exception | None = None
        self.schedules: list[Schedule] = []
        self.schedule = EngineSchedule()

    async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
        self.schedules.append(schedule)
        self.schedule = EngineSchedule(schedule)
        return self.schedule

    async def go_plain(self) -> None:
        self.plain += 1
        self.schedule = EngineSchedule()
        if self.broken is not None:
            raise self.broken
        self.schedule = EngineSchedule(NOTHING)

    async def self_test(self, seconds: float, engines: int, part: Any) -> SelfTestReport:
        self.tested += 1
        await asyncio.sleep(seconds)
        return SelfTestReport((), seconds)


class Engine:
    """An engine that may be paused."""

    def __init__(self, paused: bool) -> None:
        self.paused, self.ran = paused, False

    async def is_paused(self) -> bool:
        return self.paused

    async def resume_generation(self) -> None:
        self.paused, self.ran = False, True

    async def pause_generation(self) -> None:
        self.paused = True


class TrainersServer:
    """verl's half."""

    def __init__(self, mode: RolloutMode = RolloutMode.STANDALONE, timeout: float = 5.0, node_rank: int = 0) -> None:
        self.rollout_mode, self.node_rank, self.global_steps = mode, node_rank, None
        self._spec_front = Front(timeout)
        self._submission_paused, self._rejecting, self._resume_event = True, False, asyncio.Event()
        self.opened = 0

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        return {"aborted_count": 3}

    async def open_submission_gate(self) -> None:
        self.opened += 1
        self._submission_paused = False
        self._resume_event.set()


class Server(Gate, TrainersServer):
    """As ``SpecHttpServer`` mixes them."""


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def described(**how: Any) -> Server:
    server = Server(**how)
    await server.spec_description()
    return server


def test_requests_wait_for_the_actor_and_the_actor_for_the_weights():
    async def scene() -> list[str]:
        server, said = await described(), []

        async def actor() -> None:
            said.append(f"weights of version {await server.spec_at_gate(1)}")
            await asyncio.sleep(0.05)
            said.append("draft is in")
            await server.spec_go(1, "")

        async def request() -> None:
            await server.spec_admitted()
            said.append("request")

        async def trainer() -> None:
            await asyncio.sleep(0.05)
            await server.set_global_steps(7)
            await asyncio.sleep(0.05)
            said.append("gate")
            await server.open_submission_gate()

        await asyncio.gather(actor(), request(), trainer())
        return said

    assert run(scene()) == ["gate", "weights of version 7", "draft is in", "request"]


def test_an_actor_that_never_says_so_costs_the_draft_and_a_warning(caplog):
    async def scene() -> Server:
        server = await described(timeout=0.1)
        await server.set_global_steps(1)
        await server.open_submission_gate()
        return server

    with caplog.at_level(logging.WARNING):
        server = run(scene())
    assert server.opened == 1 and server._spec_front.plain == 1
    (record,) = caplog.records
    assert "spec.gate_timeout_s" in record.message and "without drafts until the next sync" in record.message


def test_law_6_the_gate_opens_also_where_the_engine_does_not_confirm_that_it_is_plain(caplog):
    async def scene() -> Server:
        server = await described(timeout=0.1)
        server._spec_front.broken = RuntimeError("no answer")
        await server.set_global_steps(1)
        await server.open_submission_gate()
        return server

    with caplog.at_level(logging.WARNING):
        server = run(scene())
    assert server.opened == 1 and "is checked as drafted text" in caplog.records[-1].message


def test_a_self_test_that_takes_longer_than_the_actor_may_is_waited_for():
    """Else its engine would draft nothing in the middle of it, and a correct run would be stopped."""

    async def scene() -> Server:
        server = await described(timeout=0.1)
        server.engine = Engine(paused=False)
        await server.set_global_steps(1)

        async def actor() -> None:
            await server.spec_at_gate(1)
            await server.spec_self_test(0.4)
            await server.spec_go(1, "")

        await asyncio.gather(server.open_submission_gate(), actor())
        return server

    server = run(scene())
    assert server._spec_front.plain == 0 and server.opened == 1


def test_law_2_an_engine_that_does_not_sample_from_the_target_never_opens():
    async def scene() -> Server:
        server = await described()
        await server.set_global_steps(1)
        await server.spec_go(1, "the self-test failed")
        with pytest.raises(LosslessError, match="the self-test failed"):
            await server.open_submission_gate()
        return server

    assert run(scene()).opened == 0


def test_a_run_without_an_actor_of_ours_is_refused_at_once():
    async def scene() -> None:
        server = Server()
        await server.set_global_steps(1)
        await server.open_submission_gate()

    with pytest.raises(SpecConfigError, match=r"actor\.strategy=fsdp"):
        run(scene())


@pytest.mark.parametrize("how", [{"mode": RolloutMode.HYBRID}, {"node_rank": 1}])
def test_nobody_waits_where_the_actor_stands_in_between_nor_on_a_node_without_the_engine(how):
    async def scene() -> Server:
        server = Server(**how)
        await server.set_global_steps(1)
        await server.open_submission_gate()
        return server

    assert run(scene()).opened == 1


def test_a_go_of_the_sync_before_opens_nothing():
    async def scene() -> Server:
        server = await described(timeout=0.1)
        await server.set_global_steps(1)
        await server.spec_go(1, "")
        await server.open_submission_gate()
        assert server._spec_front.plain == 0
        await server.set_global_steps(2)
        await server.open_submission_gate()
        return server

    assert run(scene())._spec_front.plain == 1


DRAFTS, NOTHING = Schedule((3, 3)), Schedule((0, 0))


def test_law_6_an_actor_that_is_late_changes_nothing_in_the_phase_that_has_begun_and_is_in_time_for_the_next():
    async def scene() -> list[Any]:
        server, seen = await described(timeout=0.1), []
        server.engine = Engine(paused=False)
        await server.set_global_steps(1)
        await server.open_submission_gate()
        server._spec_front.busy = True
        seen.append(await asyncio.wait_for(server.spec_at_gate(1), 1.0))
        report = await server.spec_self_test(1.0)
        seen.append((report.passed, report.out_of_time))
        seen.append((await server.spec_set_schedule(DRAFTS)).drafting)
        await server.spec_set_schedule(NOTHING)
        seen.append(list(server._spec_front.schedules))
        seen.append((await server.spec_go(1, "")).drafting)
        server._spec_front.busy = False
        await server.set_global_steps(2)
        opening = asyncio.ensure_future(server.open_submission_gate())
        await server.spec_at_gate(2)
        await server.spec_set_schedule(DRAFTS)
        seen.append((await server.spec_go(2, "")).drafting)
        await opening
        seen.append(list(server._spec_front.schedules))
        return [*seen, server._spec_front.plain]

    assert run(scene()) == [1, (False, True), False, [NOTHING], False, True, [NOTHING, DRAFTS], 1]


def test_law_6_the_gate_of_the_next_sync_is_not_open_because_the_one_before_was_given_up():
    async def scene() -> None:
        server = await described(timeout=0.1)
        await server.set_global_steps(1)
        await server.open_submission_gate()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.spec_at_gate(2), 0.2)

    run(scene())


def test_a_sync_counts_once_its_weights_are_in_place():
    class Slow(TrainersServer):
        async def set_global_steps(self, global_steps: int) -> None:
            await asyncio.sleep(0.2)
            await super().set_global_steps(global_steps)

    class SlowServer(Gate, Slow):
        pass

    async def scene() -> int | None:
        server = SlowServer()
        setting = asyncio.ensure_future(server.set_global_steps(7))
        await server.spec_synced(1, awake=False)
        found = server.global_steps
        await setting
        return found

    assert run(scene()) == 7


@pytest.mark.parametrize(("tags", "awake"), [(["weights"], False), (["kv_cache"], True), (None, True)])
def test_a_replica_is_awake_once_its_kv_cache_is(tags, awake):
    class Sleeper(TrainersServer):
        async def wake_up(self, tags: list[str] | None = None) -> None:
            pass

        async def sleep(self) -> None:
            pass

    class SleepingServer(Gate, Sleeper):
        pass

    async def scene() -> bool:
        server = SleepingServer()
        await server.set_global_steps(1)
        await server.sleep()
        await server.wake_up(tags)
        try:
            await asyncio.wait_for(server.spec_synced(1, awake=True), 0.2)
        except TimeoutError:
            return False
        return True

    assert run(scene()) == awake


def test_cutting_requests_short_is_noticed():
    async def scene() -> Server:
        server = Server()
        assert await server.abort_all_requests() == {"aborted_count": 3}
        return server

    assert run(scene())._spec_front.interrupted


@pytest.mark.parametrize("paused", [True, False])
def test_a_paused_engine_runs_for_the_self_test_and_is_paused_again(paused):
    async def scene() -> Server:
        server = Server()
        server.engine = Engine(paused)
        await server.spec_self_test(0.01)
        return server

    server = run(scene())
    assert server._spec_front.tested == 1
    assert server.engine.paused == server.engine.ran == paused


def test_an_engine_that_rolls_out_already_is_not_tested():
    server = Server()
    server._spec_front.busy = True
    with pytest.raises(RuntimeError, match="needs an engine without requests"):
        run(server.spec_self_test(1.0))


def test_verl_still_dies_of_its_own_log_line():
    """When this fails: drop VERL_LOGGING_LEVEL from spec_plugin_verl_cpu.run, and the line on it in docs/guides/async.md."""
    assert "flush=True" in source_of("verl", "trainer/ppo/v1/trainer_separate_async.py")
