"""verl's rollout adapter in the actor process, plus refresh after each weight sync, self-test and schedule."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
import zmq
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from spec_plugin import SpecConfigError
from spec_plugin.events import DraftRefresh, RefreshReport, WeightSync
from spec_plugin.methods.eagle3 import starting_draft
from spec_plugin.rollout import ActorsLink, RolloutControl
from spec_plugin.session import SpecSession
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported
from spec_plugin_verl.runtime import RUNTIME


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


class VerlLink(ActorsLink):
    """The one engine replica of this actor process; the draft goes over verl's own weight transport."""

    def __init__(self, adapter: SpecServerAdapter, timeout_s: float) -> None:
        super().__init__((), timeout_s)
        self._adapter = adapter

    def engines(self) -> Sequence[Any]:
        """verl's handle, which exists once the server has started."""
        self._adapter._ensure_server_handle()
        return (self._adapter.server_handle,)

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        """Send the draft over verl's own transport and have the engine install it, all or nothing."""
        adapter = self._adapter
        largest = max(t.nbytes for t in refresh.tensors.values())
        total = sum(t.nbytes for t in refresh.tensors.values())
        limit = adapter.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket_mb = (max(largest, min(total, limit)) >> 20) + 1
        future = self.engines()[0].spec_receive.remote(
            use_shm=adapter.use_shm,
            version=refresh.draft_version,
            digest=refresh.digest,
            names=list(refresh.tensors),
            force=force,
            timeout_s=self.timeout_s,
        )
        sender = TimedSender(f"{adapter.zmq_handle}.draft", bucket_mb, adapter.use_shm, self.timeout_s)
        await sender.async_send_weights(iter(refresh.tensors.items()))
        report: RefreshReport = await future
        return report


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
        self._dtype = getattr(torch, target.dtype)
        self._control = RolloutControl(SpecSession(spec, target), VerlLink(self, spec.refresh_timeout_s))
        RUNTIME.control = self._control
        engine.attach(self._control, starting_draft(spec, target).config.aux_layers)

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
        tap = PolicyTap(weights, self._dtype)
        await super().update_weights(aiter(tap), global_steps=global_steps, wire_format=wire_format, **kwargs)
        version = self._control.policy_version + 1 if global_steps is None else global_steps
        await self._control.synced(tap.event(version))
        if not self.config.free_cache_engine:
            await self._control.begin()

    async def resume(self, tags: list[str]) -> None:
        """verl's wake-up; once the KV cache is back the engine can generate."""
        await super().resume(tags)
        if "kv_cache" in tags and self._control.policy_version >= 0:
            await self._control.begin()


def _dtype_name(engine: Any) -> str:
    """Dtype of the actor's forward pass, as FSDP's mixed precision resolved it."""
    return str(getattr(engine, "_autocast_dtype", torch.bfloat16)).removeprefix("torch.")
