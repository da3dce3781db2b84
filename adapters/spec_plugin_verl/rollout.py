"""verl's rollout adapter in the actor process, plus refresh after each weight sync, self-test and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from spec_plugin_verl_check.options import ACTORS, BOTH_PLACES
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from spec_plugin.adapter import ActorsLink, Reason, SpecConfigError, SpecSession, actor_group, is_first
from spec_plugin_verl.actor import SpecActor
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported
from spec_plugin_verl.weights import SYNC_TIMEOUT_S, PolicyStream


class VerlLink(ActorsLink):
    """All replicas of the run, found by the names that verl gives their servers; of one across nodes, the first node's."""

    def __init__(self, prefix: str, replicas: int, timeout_s: float) -> None:
        super().__init__((), timeout_s, ray.put)
        self._names = [f"{prefix}server_{i}_0" for i in range(replicas)]

    def engines(self) -> Sequence[Any]:
        """The servers, which exist once verl has started them."""
        if not self._engines:
            self._engines = [ray.get_actor(name) for name in self._names]
        return self._engines


class SpecServerAdapter(ServerAdapter):  # type: ignore[misc]
    """One per actor process (verl's hybrid modes: actor and rollout in one process)."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        """Parse the options and build the session, before any engine starts.

        Raises:
            SpecConfigError: if an option is wrong, or verl's configuration has something that is not supported.
        """
        super().__init__(config, model_config, device_mesh, replica_rank)
        refuse_unsupported(config, model_config)
        spec = read_config(config)
        engine = SpecActor.of_this_process
        if engine is None:
            raise SpecConfigError(
                "spec-plugin: the actor in the rollout's process has no adapter: set actor.strategy="
                f"{' or '.join(ACTORS)}, or leave the flag out"
            )
        if (backend := config.checkpoint_engine.backend) != "naive":
            raise SpecConfigError(
                f"spec-plugin does not support {BOTH_PLACES} yet "
                f"(checkpoint_engine.backend={backend!r}): with trainer.v1.trainer_mode=separate_async set "
                "actor_rollout_ref.hybrid_engine=False, with other modes actor_rollout_ref.rollout.checkpoint_engine.backend="
                "naive; or leave the flag out"
            )
        target = read_target(config, model_config, engine.spec_dtype(), actor_group())
        link = self._link(spec.refresh_timeout_s) if is_first() else None
        session, sleeps = SpecSession(spec, target), bool(config.free_cache_engine)
        self._run = engine.attach(session, link, sleeps=sleeps, response_length=config.response_length)
        self._syncs = 0
        self._policy = PolicyStream(self._run.session)

    def _link(self, timeout_s: float) -> VerlLink:
        config = self.config
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        world = torch.distributed.get_world_size()
        return VerlLink(self._get_server_name_prefix(), world // size, timeout_s)

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """verl's weight sync; then, at the same safe point, the refresh.

        Raises:
            LosslessError: if the start-up self-test finds that the engine does not sample from the target.
            ray.exceptions.ActorDiedError: if the engine is gone; verl's sender would wait for it without an end.
        """
        if wire_format != "named_tensors":
            raise SpecConfigError(
                "spec-plugin does not support delta weight syncs yet: set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive, or leave the flag out"
            )
        if self._ensure_server_handle():
            await self.server_handle.__ray_ready__.remote()
        tap = self._policy.tap(weights, **kwargs)
        await super().update_weights(aiter(tap), global_steps=global_steps, wire_format=wire_format, **kwargs)
        self._syncs += global_steps is not None  # verl announces no other sync to its servers
        if not self._policy.complete(tap, **kwargs):
            return  # the adapters come now
        await self._all_replicas(awake=False)
        # verl syncs without a step after a reward model had the cards, on the way to validation: the weights are the same
        version = max(0, self._run.policy_version) if global_steps is None else global_steps
        awake = not self.config.free_cache_engine
        await self._run.weights_synced(version, *tap.copies(), copied=True, rollouts_begin=awake)

    async def _all_replicas(self, awake: bool) -> None:
        """Each replica gets weights, and wakes up, at its own pace; the one that speaks to all of them waits for all."""
        link, session = self._run.link, self._run.session
        if isinstance(link, VerlLink) and not session.failed:
            with session.guarded(Reason.ENGINES, "waiting for all replicas"):
                await link.call_all("spec_synced", self._syncs, awake, timeout_s=SYNC_TIMEOUT_S)

    async def resume(self, tags: list[str]) -> None:
        """verl's wake-up; once the KV cache is back the engine can generate."""
        await super().resume(tags)
        if "kv_cache" in tags and self._run.policy_version >= 0:
            await self._all_replicas(awake=True)
            await self._run.rollouts_begin()


def server_adapter(config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> ServerAdapter:
    """What verl makes beside an actor; beside a standalone rollout, whose rank verl tells, it is verl's own."""
    chosen = SpecServerAdapter if replica_rank == -1 else ServerAdapter
    return chosen(config, model_config, device_mesh, replica_rank)
