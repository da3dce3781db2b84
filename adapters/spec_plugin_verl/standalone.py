"""Actors whose engines live in processes of their own (``trainer_mode=separate_async``, ``hybrid_engine=False``).

There verl builds an actor and no rollout adapter beside it: the weights leave through a checkpoint engine, and a worker beside
the rollout takes them in. So the actor notices the end of its weight stream, waits in a thread until every server stands at its
gate with these weights, refreshes and tests, and lets the requests in (``spec_plugin_verl.gate``). verl's driver waits for
the gate, so nothing else runs in the actor meanwhile.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import ray
from spec_plugin_verl_check.options import EVERYWHERE
from torch import Tensor

from spec_plugin.adapter import (
    ActorsLink,
    EngineLink,
    EngineSchedule,
    Reason,
    SpecConfigError,
    SpecRun,
    SpecSession,
    actor_group,
    callers_stream,
    is_first,
    of_first,
)
from spec_plugin_verl.weights import SYNC_TIMEOUT_S, PolicyTap

#: names that verl gives the servers of the policy; of one across nodes, the first node's
_SERVER = re.compile(r"vllm_server_\d+_0")


class Standalone:
    """What one rank of such an actor does around each weight sync."""

    def __init__(self, dtype: str, attach: Callable[[SpecSession, EngineLink | None], SpecRun]) -> None:
        """Take the options from the servers, which have started by now, and attach to the actor.

        Args:
            dtype: of its forward pass, as torch names it.
            attach: begins speculative rollouts for it; the link is None except on the first rank.

        Raises:
            SpecConfigError: if a plugin refuses this run.
        """
        servers = [ray.get_actor(name) for name in sorted(ray.util.list_named_actors()) if _SERVER.fullmatch(name)]
        if not all(hasattr(server, "spec_description") for server in servers):
            raise SpecConfigError(
                f"spec-plugin is loaded in the actor and not in the rollout's servers: set {EVERYWHERE} (verl's older mains "
                "start engines before they import model.external_lib)"
            )
        config, target = ray.get([server.spec_description.remote() for server in servers])[0]
        target = replace(target, actor_dtype=dtype, actor_group=actor_group())
        self._link = ActorsLink(servers, config.refresh_timeout_s, ray.put) if is_first() else None
        self._run = attach(SpecSession(config, target), self._link)
        self._syncs = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def tap(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the weight stream on; behind its end the next phase begins."""
        self.wait()
        tap = PolicyTap(weights, self._run.session.copy_of, self._run.session.target.hf_config)
        yield from tap
        self._syncs += 1
        self._thread = threading.Thread(
            target=self._begin_phase, args=(tap, callers_stream()), name="spec-plugin sync", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Before anything that needs the state of the phase.

        Raises:
            LosslessError: if an engine does not sample from the target; or what else ended the beginning of the phase.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _begin_phase(self, tap: PolicyTap, on_stream: Callable[[], AbstractContextManager[None]]) -> None:
        problem = ""
        try:
            # law 6: the gate opens, the next phase is plain
            with self._run.session.guarded(Reason.SCHEDULE, "the beginning of a phase"), on_stream():
                asyncio.run(self._begin(tap))
        except BaseException as error:  # in a thread nobody would hear of it: the one that waits raises it
            self._error, problem = error, str(error) or type(error).__name__
        if self._link is None:
            return
        try:
            with self._run.session.guarded(
                Reason.ENGINES, "opening the gate"
            ):  # law 6: the gate has a time-out of its own
                in_force = asyncio.run(self._link.call_all("spec_go", self._syncs, problem))
                self._run.session.engines = EngineSchedule.of_all(in_force)  # a gate may have opened without us
        except BaseException as error:
            self._error = self._error or error

    async def _begin(self, tap: PolicyTap) -> None:
        version = -1  # unknown
        if self._link is not None:
            with self._run.session.guarded(
                Reason.ENGINES, "waiting for the engines' weights"
            ):  # law 6; the ranks go on together
                version = max(await self._link.call_all("spec_at_gate", self._syncs, timeout_s=SYNC_TIMEOUT_S))
        await self._run.weights_synced(of_first(version), *tap.copies(), copied=True)
