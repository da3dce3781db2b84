"""Every kind of failure, a link whose calls fail, and a trainer's steps around a real session and control."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from builders.batches import batch_of, span_of, stated_of
from builders.spec_run import run_of, spans_of, synced, trained
from builders.training import TARGET, hidden, sync
from spec_plugin import LogprobProvenanceError, LosslessError, SpecConfig, hookimpl
from spec_plugin.api.events import (
    DraftRefresh,
    Drafts,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.method import Method
from spec_plugin.api.rollouts import Rollout
from spec_plugin.api.spans import FORGOTTEN
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.links import EngineLink
from spec_plugin.trainer.spec_run import SpecRun

#: nothing happens, or a value is left out; speculation is off and the run goes on, with one warning; the run stops
ON, OFF, STOPS = "on", "off", "stops"


class RemoteError(Exception):
    """As remote calls wrap what the other side raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("the other side failed")
        self.cause = cause


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def chained() -> Exception:
    error = RuntimeError("the plugin's own words")
    error.__cause__ = ValueError("between")
    error.__cause__.__cause__ = LogprobProvenanceError("underneath")
    return error


#: kind of failure -> what is raised, and what must happen wherever it comes from
RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "exception": (lambda: RuntimeError("out of luck"), OFF),
    "no memory": (lambda: MemoryError(), OFF),  # the policy's own want of memory stops the trainer by itself
    "unprintable": (UnprintableError, OFF),
    "cancelled": (asyncio.CancelledError, OFF),  # by whoever should have answered, not the run itself
    "law 2": (lambda: LosslessError("on purpose"), STOPS),
    "law 3": (lambda: LogprobProvenanceError("on purpose"), STOPS),
    "law 2, remote": (lambda: RemoteError(LosslessError("on purpose")), STOPS),
    "law 3, chained": (chained, STOPS),
    "user interrupts": (KeyboardInterrupt, STOPS),
    "exit": (lambda: SystemExit(3), STOPS),
    "exit, remote": (lambda: RemoteError(SystemExit(3)), STOPS),
}
#: the same for an answer that does not come, or is not one
TIME_OUT, ANSWERS = "time-out", ("wrong type", "None", "NaN")

#: call -> what must happen after an answer of a wrong type, None, and one with NaN in it

_NAN = math.nan
WITH_NAN: dict[str, Any] = {
    "memory.recall": [_NAN],
    "spec_head_start": _NAN,
    "spec_can_pay": _NAN,
    "spec_slowdown_without_drafts": _NAN,
    "spec_draft_weights": _NAN,
    "spec_schedule": Schedule((_NAN,) * (TARGET.max_num_seqs + 1)),  # type: ignore[arg-type]
    "spec_metrics": {"spec/mine": _NAN},
    "link.install": RefreshReport(True, _NAN, "", _NAN),  # type: ignore[arg-type]
    "link.set_schedule": EngineSchedule(Schedule((_NAN,) * (TARGET.max_num_seqs + 1))),  # type: ignore[arg-type]
    "link.self_test": SelfTestReport((), _NAN),
    "link.stats": RolloutStats(0, 1, _NAN, _NAN),  # type: ignore[arg-type]
    "link.share_rollouts": [_NAN],
    "link.spans": [_NAN],
    "link.state": EngineState("synced", 0, _NAN, "", ""),  # type: ignore[arg-type]
}


@dataclass(frozen=True)
class Fault:
    """One cell."""

    call: str = ""
    kind: str = ""
    times: int = 1_000_000

    def answer(self) -> Any:
        """Of a plugin: what it does instead."""
        if self.kind in RAISED:
            raise RAISED[self.kind][0]()
        if self.kind == TIME_OUT:
            raise TimeoutError("a plugin's own limit")
        return {"wrong type": 7j, "None": None, "NaN": WITH_NAN.get(self.call, _NAN)}[self.kind]

    async def remote_answer(self) -> Any:
        """Of an engine."""
        if self.kind == TIME_OUT:
            await asyncio.Event().wait()
        return self.answer()


#: what a run asks of a link; the rest is how a link reaches its engines
LINK_CALLS = {name for name in vars(EngineLink) if not name.startswith("_")} - {"engines", "call", "put", "call_all"}


@dataclass
class FakeLink:
    """An engine that takes tables, and one call that fails."""

    fault: Fault
    takes_it_first: bool = False  # is a table in force although its call fails
    table: tuple[int, ...] = (8,) * (TARGET.max_num_seqs + 1)  # an engine begins with drafts
    calls: list[str] = field(default_factory=list)

    async def _answer(self, name: str, good: Any) -> Any:
        self.calls.append(name)
        if self.fault.call == f"link.{name}" and self.calls.count(name) <= self.fault.times:
            return await self.fault.remote_answer()
        return good

    async def install(self, refresh: DraftRefresh, force: bool) -> Any:
        return await self._answer("install", RefreshReport(True, refresh.draft_version, refresh.digest, 1.0))

    async def set_schedule(self, schedule: Schedule) -> Any:
        before, fails = self.table, self.calls.count("set_schedule") < self.fault.times
        fails = fails and self.fault.call == "link.set_schedule" and self.fault.kind not in ANSWERS
        self.table = before if fails and not self.takes_it_first else schedule.table
        return await self._answer("set_schedule", EngineSchedule(schedule))

    async def self_test(self, seconds: float, part: SelfTestPart) -> Any:
        return await self._answer("self_test", SelfTestReport((), 1.0))

    async def start_phase(self, policy_version: int) -> Any:
        return await self._answer("start_phase", None)

    async def stats(self, policy_version: int) -> Any:
        return await self._answer("stats", RolloutStats(policy_version, 2, 20, 1.0, 10, 30, 20, (9, 7, 4)))

    async def share_rollouts(self, most_tokens: int) -> Any:
        return await self._answer("share_rollouts", [Rollout(b"\1\0\0\0", b"\2\0\0\0")])

    async def remember(self, rollouts: Any) -> Any:
        return await self._answer("remember", None)

    async def spans(self) -> Any:
        return await self._answer("spans", [span_of([1], [2, 3], 0), FORGOTTEN])

    async def state(self, moment: str) -> Any:
        return await self._answer("state", EngineState(moment, 0, 0, "", ""))


class Remembered:
    """Rollouts of a run before."""

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        pass

    def recall(self) -> Sequence[Rollout]:
        return [Rollout(b"", b"\3\0\0\0")]


class Drafter:
    """A method that remembers, and a draft of one tensor."""

    def __init__(self) -> None:
        self.memory = Remembered()

    @hookimpl
    def spec_method(self) -> Method:
        return Method("eagle3", {}, harvest=(), pretrained=True, memory=self.memory)

    @hookimpl
    def spec_draft_weights(self, event: Any) -> DraftRefresh:
        return DraftRefresh(event.policy_version, event.policy_version, {"w": torch.zeros(1)}, "0")


def broken_plugin(fault: Fault) -> object:
    def hook(self: object) -> Any:
        return fault.answer()

    return type("Broken", (), {fault.call: hookimpl(tryfirst=True)(hook)})()


#: what a session calls beside hooks: the method's memory, and the kit's ear
NO_HOOKS = ("memory.keep", "memory.recall", "auditor")
USUAL = object()


def listen(session: SpecSession, call: str, answer: Callable[[], Any]) -> None:
    """Ask here first, at each such call; what comes is the answer to it, unless it is ``USUAL``."""
    owner: Any = session.method.memory
    name = call.partition(".")[2]
    usual = getattr(owner, name, None) if name else None

    def called(*args: Any) -> Any:
        found = answer()
        return found if found is not USUAL or usual is None else usual(*args)

    setattr(owner, name, called) if name else session.auditors.append(called)


def make(fault: Fault, link: FakeLink | None = None, overlaps: bool = True, **options: Any) -> SpecRun:
    manager = create_manager(block=("eagle3",), load_entry_points=False)
    manager.register(Drafter())
    if fault.call.startswith("spec_"):
        manager.register(broken_plugin(fault), name="broken")
    config = {"serve": "always", "audit": True, "refresh_timeout_s": 0.01} | options
    session = SpecSession(SpecConfig(**config), TARGET, manager)
    if fault.call in NO_HOOKS:
        listen(session, fault.call, fault.answer)
    return run_of(session, link or FakeLink(fault), overlaps=overlaps)


def steps(control: SpecRun, folder: Path, count: int = 3) -> Iterator[dict[str, float]]:
    """A trainer's steps; the engines never draft while it is said that they do not."""
    session, link = control.session, control.link
    assert isinstance(link, FakeLink)
    session.load(folder)
    session.recover()  # as after an earlier failure
    for version in range(count):
        synced(control, sync(version))
        asyncio.run(control.rollouts_begin())
        assert session.speculating or not any(link.table), "drafted text would be taken for plain"
        session.target_forward(hidden(torch.arange(12), version))
        asyncio.run(control.rollouts_end())
        spans_of(control)
        control.agree()
        logprobs, mask = torch.full((2, 4), -1.0), torch.ones(2, 4, dtype=torch.bool)
        drafts = Drafts.ON if session.speculating else Drafts.OFF
        batch = batch_of(version, logprobs, logprobs, mask, drafts)
        session.check_logprobs(batch)
        session.check_stated(stated_of(batch))
        trained(control, version)
        session.save(folder)
        yield session.metrics()
