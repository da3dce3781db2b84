"""verl's rollout adapter in the actor process, plus refresh after each weight sync, self-test and schedule."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
import zmq
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from spec_plugin import LosslessError, SpecConfigError
from spec_plugin.events import DraftRefresh, RefreshReport, WeightSync
from spec_plugin.methods.eagle3 import starting_draft
from spec_plugin.session import SpecSession
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported
from spec_plugin_verl.runtime import RUNTIME

logger = logging.getLogger("spec_plugin")


class TimedSender(BucketedWeightSender):  # type: ignore[misc]
    """verl's sender, which gives up when the receiver does not answer; verl's own waits for ever."""

    def __init__(self, zmq_handle: str, bucket_size_mb: int, use_shm: bool, timeout_s: float) -> None:
        super().__init__(zmq_handle=zmq_handle, bucket_size_mb=bucket_size_mb, use_shm=use_shm)
        self._timeout_ms = int(timeout_s * 1e3)

    def _init_socket(self) -> None:
        super()._init_socket()
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self.socket.setsockopt(option, self._timeout_ms)
        self.socket.setsockopt(zmq.LINGER, 0)


class PolicyTap:
    """Passes the weight stream on and keeps copies, in the engine's dtype, of the two tensors that the draft shares."""

    EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

    def __init__(self, weights: Any, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self.kept: dict[str, Tensor] = {}

    async def __aiter__(self) -> AsyncIterator[tuple[str, Tensor]]:
        async for name, tensor in ensure_async_iterator(self._weights):
            if name in (self.EMBED, self.HEAD):
                self.kept[name] = tensor.detach().to(self._dtype, copy=True)
            yield name, tensor

    def event(self, policy_version: int) -> WeightSync:
        """The weight sync that has just passed; a target with tied embeddings sends no head."""
        embed = self.kept.get(self.EMBED)
        return WeightSync(policy_version, embed, self.kept.get(self.HEAD, embed))


class SpecServerAdapter(ServerAdapter):  # type: ignore[misc]
    """One per actor process (verl's hybrid mode: actor and rollout in one process)."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        """Parse the options and build the session, before any engine starts.

        Raises:
            SpecConfigError: if an option is wrong, or verl's configuration has something that is not supported.
        """
        super().__init__(config, model_config, device_mesh, replica_rank)
        refuse_unsupported(config, model_config)
        spec = read_config(config)
        if RUNTIME.engine is None:
            raise SpecConfigError(
                "spec-plugin found no FSDP actor in the rollout's process: it supports actor.strategy=fsdp or fsdp2 and "
                "trainer.v1.trainer_mode=sync; set these, or leave the flag out"
            )
        engine = RUNTIME.engine
        if getattr(engine, "ulysses_sequence_parallel_size", 1) > 1:
            raise SpecConfigError(
                "spec-plugin does not support sequence parallel actors yet: set "
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1, or leave the flag out"
            )
        group = torch.distributed.group.WORLD if torch.distributed.get_world_size() > 1 else None
        target = read_target(config, model_config, _dtype_name(engine), group)
        self._spec_session = SpecSession(spec, target)
        self._tested: int | None = None  # draft version of the last self-test
        self._running_version: int | None = None
        self._installed = -1  # draft version that the engine serves
        RUNTIME.adapter, RUNTIME.session = self, self._spec_session
        engine.attach(self._spec_session, starting_draft(spec, target).config.aux_layers)

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """verl's weight sync; then, at the same safe point, the refresh.

        Raises:
            LosslessError: if the start-up self-test finds that the engine does not sample from the target.
        """
        if wire_format != "named_tensors":
            raise SpecConfigError(
                "spec-plugin does not support delta weight syncs yet: set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive, or leave the flag out"
            )
        tap = PolicyTap(weights, getattr(torch, self._spec_session.target.dtype))
        await super().update_weights(aiter(tap), global_steps=global_steps, wire_format=wire_format, **kwargs)
        RUNTIME.policy_version = RUNTIME.policy_version + 1 if global_steps is None else global_steps
        session = self._spec_session
        refresh = session.weight_sync(tap.event(RUNTIME.policy_version))
        if refresh is not None:
            try:
                session.refreshed(refresh, await self._push(refresh))
            except Exception as error:  # law 6
                session.fail("refresh", error)
        if not self.config.free_cache_engine:
            await self._begin_rollout()

    async def resume(self, tags: list[str]) -> None:
        """verl's wake-up; once the KV cache is back the engine can generate."""
        await super().resume(tags)
        if "kv_cache" in tags and RUNTIME.policy_version >= 0:
            await self._begin_rollout()

    async def _push(self, refresh: DraftRefresh) -> RefreshReport:
        """Send the draft over verl's own transport and have the engine install it, all or nothing."""
        began = time.perf_counter()
        timeout = self._spec_session.config.refresh_timeout_s
        largest = max(t.nbytes for t in refresh.tensors.values())
        total = sum(t.nbytes for t in refresh.tensors.values())
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket_mb = (max(largest, min(total, limit)) >> 20) + 1
        self._ensure_server_handle()
        future = self.server_handle.spec_refresh.remote(
            use_shm=self.use_shm,
            version=refresh.draft_version,
            digest=refresh.digest,
            names=list(refresh.tensors),
            force=refresh.draft_version == self._installed,  # the same draft again: after sleep, or untrained
            timeout_s=timeout,
        )
        sender = TimedSender(f"{self.zmq_handle}.draft", bucket_mb, self.use_shm, timeout)
        await sender.async_send_weights(iter(refresh.tensors.items()))
        report: RefreshReport = await future
        self._installed = report.draft_version
        return RefreshReport(
            report.installed,
            report.draft_version,
            report.digest,
            (time.perf_counter() - began) * 1e3,
            report.reason,
        )

    async def _begin_rollout(self) -> None:
        """Self-test before the first rollout, and once more before a trained draft is first served; then set k."""
        session = self._spec_session
        self._ensure_server_handle()
        if self._tested is None:
            await self._self_test(session)
            RUNTIME.slice_ended = time.monotonic()  # start-up is no part of the first step
        table = session.schedule(RUNTIME.policy_version)
        if table is not None and any(table) and self._tested == 0 < self._installed:
            # a newborn draft is never right, so only now can the sampler's accepting half be seen at work
            began = time.monotonic()
            await self._self_test(session)
            RUNTIME.slice_ended += time.monotonic() - began  # the draft's share is one of the step, not of the test
            table = session.schedule(RUNTIME.policy_version)
        if table is not None:
            try:
                await self.server_handle.spec_set_schedule.remote(list(table))
            except Exception as error:  # law 6
                session.fail("schedule", error)
            RUNTIME.speculating = any(table)
        await self.server_handle.spec_rollout_start.remote()
        session.rollout_start(RUNTIME.policy_version)
        self._running_version = RUNTIME.policy_version

    async def _self_test(self, session: SpecSession) -> None:
        self._tested = max(0, self._installed)
        if not session.config.self_test or session.failed:
            return
        seconds = session.config.self_test_seconds
        report = await self.server_handle.spec_self_test.remote(seconds)
        if report.out_of_time:
            logger.warning(
                "spec-plugin: %g s were too few for the self-test, once more with %g s", seconds, 4 * seconds
            )
            report = await self.server_handle.spec_self_test.remote(4 * seconds)
        if report.passed:
            lines = "".join(f"\n  {check.name}: {check.detail}" for check in report.checks)
            logger.info("spec-plugin: the self-test passed in %.1f s%s", report.seconds, lines)
            session.engine_ready(report)
            return
        message = (
            f"the start-up self-test failed after {report.seconds:.1f} s, speculation is not used:\n{report.failures()}\n"
            "`spec-plugin doctor` shows which patches and capabilities this engine has"
        )
        if session.config.on_self_test_failure == "raise" and not report.out_of_time:
            raise LosslessError(message)
        session.fail("self-test", message)

    def finish_rollout(self) -> None:
        """Called by the actor's first pass after generation: collect what the engine did; later calls do nothing."""
        if self._running_version is None:
            return
        version, self._running_version = self._running_version, None
        try:
            stats = ray.get(self.server_handle.spec_rollout_stats.remote(version))
        except Exception as error:  # law 6
            self._spec_session.fail("rollout statistics", error)
            return
        self._spec_session.rollout_end(stats)


def _dtype_name(engine: Any) -> str:
    """Dtype of the actor's forward pass, as FSDP's mixed precision resolved it."""
    return str(getattr(engine, "_autocast_dtype", torch.bfloat16)).removeprefix("torch.")
