"""The link of a trainer each of whose ranks has an engine in its own process, as with a colocated ``LLM`` (TRL)."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spec_plugin.api.errors import stops_the_run
from spec_plugin.api.events import DraftRefresh, RefreshReport
from spec_plugin.api.ranks import LIMIT_S
from spec_plugin.lifecycle.blocking import callers_stream
from spec_plugin.trainer.links import EngineLink, args_of, chosen_error

logger = logging.getLogger(__name__)


class RanksLink(EngineLink):
    """Engines that live in the actor's ranks, one in each: the first rank says what is to be done, and every rank does it.

    Every rank makes one (collective) and gives it to its ``SpecRun``. What the first rank says travels in a group of our own,
    and the other ranks do it in a thread, only inside ``serving``: there their main thread may wait in a collective call that the
    first rank makes before or behind its own calls, in whatever order. A draft is not sent: each rank has trained the same
    one, and installs its own if version and digest are the first rank's.

    Engine and trainer share the process's random streams: what a call draws from them is given back.
    """

    def __init__(self, engine: Any, timeout_s: float) -> None:
        """Collective where there are several ranks.

        Args:
            engine: of this rank, with ``SpecEngineMethods``; ``InProcessCalls`` is one. It may be set later.
            timeout_s: for which a rank waits for its own draft.
        """
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.engine, self.rank = engine, dist.get_rank() if several else 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S)) if several else None
        super().__init__(range(dist.get_world_size() if several else 1), timeout_s)
        self._has_draft = threading.Condition()
        self._draft: tuple[int, DraftRefresh | None] = (-1, None)  # policy version for which it was made
        self._serving = False
        self._serves = self._served_before = (-1, "")  # draft version and digest of this rank's engine

    # ---- on the first rank

    async def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every rank's engine at once, and wait for all.

        Raises:
            BaseException: what an engine has raised; of several what must stop the run, else that of the first of them.
        """
        if self._group is not None:
            light = [replace(a, tensors={}) if isinstance(a, DraftRefresh) else a for a in args]
            dist.broadcast_object_list([(method, light)], src=0, group=self._group)
        answers = await self._answers(method, args)
        if (error := chosen_error(answers)) is not None:
            raise error
        return answers

    # ---- on every rank

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Around what every rank does together and the first one calls engines in: the others do what it says (collective)."""
        if self._group is None or self._serving:
            yield
            return
        self._serving = True
        thread = None
        if self.rank > 0:
            thread = threading.Thread(
                target=self._serve, args=(callers_stream(),), name="spec-plugin-engine", daemon=True
            )
            thread.start()
        try:
            yield
        finally:
            self._serving = False
            if thread is None:
                dist.broadcast_object_list([None], src=0, group=self._group)
            else:
                thread.join()

    def on_local_draft(self, policy_version: int, refresh: DraftRefresh | None) -> None:
        """Hand over the draft that this rank has made for a weight sync; None: it has none to install."""
        with self._has_draft:
            self._draft = (policy_version, refresh)
            self._has_draft.notify_all()

    def _serve(self, on_stream: Callable[[], AbstractContextManager[None]]) -> None:
        with on_stream():
            while True:
                call: list[Any] = [None]
                dist.broadcast_object_list(call, src=0, group=self._group)
                if call[0] is None:
                    return
                method, args = call[0]
                asyncio.run(self._answers(method, args))

    async def _answers(self, method: str, args: Sequence[Any]) -> list[Any]:
        """All ranks' answers or errors; the same on each of them (collective)."""
        own: Any
        try:
            with random_streams_kept():
                own = await self._own(method, args)
        except Exception as error:
            own = error
        if self._group is None:
            return [own]
        answers: list[Any] = [None] * len(self.engines())
        told = _Failure.of(own, self.rank) if isinstance(own, Exception) else own
        dist.all_gather_object(answers, told, group=self._group)
        answers = [answer.error if isinstance(answer, _Failure) else answer for answer in answers]
        answers[self.rank] = own
        return answers

    async def _own(self, method: str, args: Sequence[Any]) -> Any:
        """What this rank's engine answers."""
        mine = args_of(args, self.rank)
        if method == "spec_refresh":
            return await self._refresh(*mine)
        if method == "spec_settle" and not mine[0]:
            self._serves = self._served_before
        return await getattr(self.engine, method)(*mine)

    async def _refresh(self, announced: DraftRefresh, *more: Any) -> RefreshReport:
        """Install this rank's own draft, if its version and digest are those that the first rank has announced."""
        self._served_before = self._serves  # whatever comes of this one
        refresh = announced if self.rank == 0 else self._trained(announced.policy_version)
        wanted = announced.draft_version, announced.digest
        if refresh is None or (refresh.draft_version, refresh.digest) != wanted:
            has = "none" if refresh is None else f"version {refresh.draft_version}, digest {refresh.digest}"
            why = f"rank {self.rank} has another draft than the first rank: {has}, not version {wanted[0]}, digest {wanted[1]}"
            return RefreshReport(False, *self._serves, 0.0, why)
        report: RefreshReport = await self.engine.spec_refresh(refresh, *more)
        self._serves = report.draft_version, report.digest
        return report

    def _trained(self, policy_version: int) -> DraftRefresh | None:
        """Wait for the draft that this rank's main thread makes for this policy version.

        Raises:
            TimeoutError: if it does not come.
        """
        with self._has_draft:
            if not self._has_draft.wait_for(lambda: self._draft[0] == policy_version, self.timeout_s):
                raise TimeoutError(
                    f"rank {self.rank} has made no draft for policy version {policy_version} in {self.timeout_s:g} s"
                )
            # the same version may be sent once more, with another draft
            (_, found), self._draft = self._draft, (-1, None)
            return found


@dataclass(frozen=True)
class _Failure:
    """What a rank's engine has raised, in a form that travels: of an error the other ranks may not know its class."""

    text: str
    stops: type[BaseException] | None  # what of it must stop the run

    @classmethod
    def of(cls, error: Exception, rank: int) -> _Failure:
        """What travels of an error of this rank, whose traceback stays in this rank's log."""
        stops = stops_the_run(error)
        if stops is not None:
            return cls(str(stops), type(stops))
        logger.warning("spec-plugin: on rank %d: %s: %s", rank, type(error).__name__, error, exc_info=error)
        return cls(f"rank {rank}: {type(error).__name__}: {error}", None)

    @property
    def error(self) -> BaseException:
        return RuntimeError(self.text) if self.stops is None else self.stops(self.text)


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Give back what the block draws from the process's random streams: Python's, NumPy's and torch's."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
