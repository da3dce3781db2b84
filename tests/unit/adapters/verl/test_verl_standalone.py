"""The thread in which an actor apart from its engines begins a phase: it loses nothing, and stops no correct run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from builders.training import TARGET

pytest.importorskip("verl")
from spec_plugin_verl.standalone import Standalone
from spec_plugin_verl.weights import PolicyTap

from spec_plugin import LosslessError, SpecConfig
from spec_plugin.api.events import EngineSchedule, Schedule
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.spec_run import SpecRun

DRAFTS, NOTHING = (Schedule((0,) + (k,) * TARGET.max_num_seqs) for k in (3, 0))


class Servers:
    """A link that knows whether requests were let in, and why not."""

    def __init__(self, broken: str = "", error: BaseException | None = None) -> None:
        self.broken, self.error, self.went = broken, error, []
        self.in_force = [EngineSchedule(DRAFTS), EngineSchedule(NOTHING)]

    async def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        if method == "spec_go":
            self.went.append(args)
        if method == self.broken and self.error is not None:
            raise self.error
        return self.in_force if method == "spec_go" else [7, 7]


class Run(SpecRun):
    """Where something may fail."""

    def __init__(self, session: SpecSession, error: BaseException | None) -> None:
        super().__init__(session, None, harvest=lambda _: None)  # type: ignore[arg-type, return-value]
        self.error, self.versions = error, list[int]()

    async def weights_synced(self, version: int, *_: Any, **_options: Any) -> None:
        self.versions.append(version)
        if self.error is not None:
            raise self.error


def synced(error: BaseException | None = None, link: Servers | None = None) -> tuple[Standalone, Servers]:
    actor = object.__new__(Standalone)
    session = SpecSession(SpecConfig(), TARGET, create_manager(load_entry_points=False))
    actor._run, actor._link = Run(session, error), link or Servers()
    actor._syncs, actor._thread, actor._error = 0, None, None
    stream = [("model.embed_tokens.weight", torch.zeros(2, 2)), ("other", torch.ones(1))]
    assert [name for name, _ in actor.tap(stream)] == ["model.embed_tokens.weight", "other"]
    return actor, actor._link


def test_the_next_phase_begins_behind_the_weights():
    actor, servers = synced()
    actor.wait()
    assert actor._run.versions == [7] and servers.went == [(1, "")]


@pytest.mark.parametrize(
    ("in_force", "drafts"), [((DRAFTS, NOTHING), True), ((NOTHING, NOTHING), False), ((NOTHING, None), True)]
)
def test_law_6_an_actor_that_no_engine_has_waited_for_knows_that_the_phase_is_plain_if_all_of_them_say_so(
    in_force, drafts
):
    servers = Servers()
    servers.in_force = list(map(EngineSchedule, in_force))
    actor, _ = synced(link=servers)
    actor.wait()
    session = actor._run.session
    assert session.engines is not None and session.engines.drafting == drafts and not session.failed


@pytest.mark.parametrize("error", [LosslessError("not the target"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_laws_2_and_3_what_stops_the_run_is_told_to_the_servers_and_to_the_trainer(error):
    actor, servers = synced(error)
    with pytest.raises(type(error)):
        actor.wait()
    assert servers.went[0][1], "the gate must not open"


def test_law_6_trouble_in_the_thread_lets_the_requests_in():
    actor, servers = synced(RuntimeError("out of luck"))
    actor.wait()
    assert servers.went == [(1, "")] and "out of luck" in (actor._run.session.failure or "")


@pytest.mark.parametrize("broken", ["spec_at_gate", "spec_go"])
def test_law_6_servers_that_do_not_answer_cost_speculation_only(broken):
    actor, servers = synced(link=Servers(broken, TimeoutError("no answer")))
    actor.wait()
    assert "no answer" in (actor._run.session.failure or "") and len(servers.went) == 1


def test_law_6_a_copy_that_fails_leaves_the_weight_stream_whole():
    failures: list[str] = []

    def no_room(tensor: torch.Tensor) -> None:
        failures.append("out of memory")

    sent = [
        ("lm_head.weight", torch.ones(1)),
        ("model.language_model.embed_tokens.weight", torch.zeros(1)),
        ("rest", torch.zeros(2)),
    ]
    tap = PolicyTap(sent, no_room)
    assert list(tap) == sent
    assert len(failures) == 2 and tap.copies() == (None, None)

    async def names() -> list[str]:
        return [name async for name, _ in PolicyTap(sent, torch.clone)]

    assert asyncio.run(names()) == [name for name, _ in sent]
