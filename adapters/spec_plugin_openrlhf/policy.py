"""OpenRLHF's policy actor, plus harvest in its experience pass, log-prob checks, draft training, refresh and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import ray
import torch
from openrlhf.trainer.ray import ppo_actor
from torch import Tensor

from spec_plugin.actor.control import RolloutControl, RolloutHarvest, run_blocking
from spec_plugin.actor.decoder import find_decoder
from spec_plugin.actor.harvest import PackedShards
from spec_plugin.actor.links import ActorsLink
from spec_plugin.config import SpecConfig
from spec_plugin.engine.control import plain_tokens
from spec_plugin.events import LogprobBatch, TargetInfo, WeightSync
from spec_plugin.logs import configure_logging
from spec_plugin.ranks import actor_group, is_first
from spec_plugin.session import SpecSession
from spec_plugin_openrlhf import checkpoints
from spec_plugin_openrlhf.ray_classes import undecorated
from spec_plugin_openrlhf.turns import LAST_VERSION, VERSION


class SpecPolicyModelActor(undecorated(ppo_actor.PolicyModelActor, "PolicyModelActor")):  # type: ignore[misc]
    """One data-parallel rank; rank 0 talks to the engines, all of them train one draft."""

    spec_config: SpecConfig  # set by ``registration.install``
    spec_target: TargetInfo

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: Any = None, vllm_engines: Any = None
    ) -> None:
        """Build the model as OpenRLHF does; then, before the first rollout, the session, the self-test and k.

        Raises:
            LosslessError: if an engine does not sample from the target.
        """
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)
        configure_logging()
        target = replace(
            self.spec_target,
            max_num_seqs=ray.get(vllm_engines[0].spec_max_num_seqs.remote()),
            actor_group=actor_group(),
        )
        session = SpecSession(self.spec_config, target)
        link = ActorsLink(vllm_engines, self.spec_config.refresh_timeout_s, ray.put) if is_first() else None
        self._spec = RolloutControl(session, link, overlaps=strategy.args.train.async_enable)
        ring = strategy.ring_attn_group
        shards = None if ring is None else PackedShards(ring)
        self._spec_harvest = RolloutHarvest(self._spec, lambda: find_decoder(self._spec_model), shards)
        resumed = int(self.checkpoint_states.get("global_step", 0))
        self._spec_next_version = resumed
        if resumed:  # the trainer sends the weights before it begins
            session.load(checkpoints.latest(Path(strategy.args.ckpt.path)))
        else:  # the engines have loaded the same checkpoint as the actor
            self._spec_synced()

    @property
    def _spec_model(self) -> Any:
        """The Hugging Face model behind DeepSpeed's engine."""
        return self.actor.model.module

    def _spec_synced(self) -> None:
        version, self._spec_next_version = self._spec_next_version, self._spec_next_version + 1
        event = WeightSync(
            version,
            self._spec_tensor(self._spec_model.get_input_embeddings()),
            self._spec_tensor(self._spec_model.get_output_embeddings()),
        )
        run_blocking(self._spec_refresh(event))
        self._spec_harvest.open()

    async def _spec_refresh(self, event: WeightSync) -> None:
        await self._spec.synced(event)
        await self._spec.begin()

    def _spec_tensor(self, module: Any) -> Tensor | None:
        """A copy of a layer's whole weight, if there is room for it; every rank must call it (ZeRO-3 gathers)."""
        zero_3 = self.strategy.args.ds.zero_stage == 3
        with deepspeed.zero.GatheredParameters([module.weight], enabled=zero_3):
            return self._spec.session.copy_of(module.weight)

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The experience pass: harvest on the way."""
        run_blocking(self._spec.finish())
        with self._spec_harvest.capture(lambda: _documents(sequences, action_mask, attention_mask)):
            return super().forward(sequences, action_mask, attention_mask, *args, **kwargs)

    def fit(self, kl_ctl: float = 0) -> dict[str, Any]:
        """Check the log-probs, update the policy, then one slice of draft training.

        Raises:
            LogprobProvenanceError: if a log-prob is not the target's; nothing has entered the loss then.
        """
        self._spec.agree()
        self._spec.session.check_logprobs(self._spec_batch())
        status: dict[str, Any] = super().fit(kl_ctl)
        self._spec.train_draft(self._spec.policy_version)
        metrics = self._spec.session.metrics()
        # OpenRLHF merges all ranks' dicts, the last one wins: only the rank that knows the engines reports
        return {**status, **metrics} if self._spec.link is not None else status

    def _spec_batch(self) -> LogprobBatch:
        """What is about to enter the loss (collective)."""
        items = self.trainer.replay_buffer.items
        info = [item.info for item in items]
        rollout = None if any(i.rollout_log_probs is None for i in items) else [i.rollout_log_probs for i in items]
        first, last = (torch.tensor([int(i.get(name, -1)) for i in info]) for name in (VERSION, LAST_VERSION))
        mask = _padded([i.action_mask for i in items]).bool()
        starts = [1] * len(items)  # OpenRLHF cuts the first token off
        batch = LogprobBatch(
            policy_version=self._spec.policy_version,
            recomputed=_padded([i.action_log_probs for i in items]),
            rollout=None if rollout is None else _padded(rollout),
            mask=mask,
            rollout_versions=first,
            last_versions=last,
            speculating=self._spec.speculating,
            rollout_in_loss=self.strategy.args.algo.advantage.is_correction_level != "off",
            plain=plain_tokens(mask, info, starts),
        )
        spans = self._spec.spans()
        if not self._spec.lags:
            return batch
        versions, plain = spans.of([item.sequences for item in items], starts, mask, (first, last))
        drafted = bool((mask & ~plain).any())  # in the phases that sampled it, not in the one that runs
        return replace(batch, lag_allowed=True, speculating=drafted, token_versions=versions, plain=plain)

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's weight sync (inside the asynchronous trainer's lock and pause); then, at the same safe point, ours.

        Raises:
            ray.exceptions.RayError: if an engine is gone. OpenRLHF would notice with its next rollouts, and save a checkpoint
                before, which has no draft, since that counts as draft trouble until it is known whose it is.
        """
        super().broadcast_to_vllm()
        self._spec_synced()
        if self._spec.session.failed and self._spec.link is not None:
            ray.get([engine.spec_lives.remote() for engine in self.vllm_engines])

    def save_checkpoint(self, tag: str, *args: Any, **kwargs: Any) -> None:
        """OpenRLHF's checkpoint, and the plugins' in ``_actor/<tag>/spec_plugin``."""
        folder, session = Path(self.strategy.args.ckpt.path), self._spec.session
        saves = torch.distributed.get_rank() == 0 and not self.disable_ds_ckpt
        if saves:
            session.save(checkpoints.waiting(folder, tag))
        super().save_checkpoint(tag, *args, **kwargs)
        if saves:
            with session.guarded("save"):
                checkpoints.move_in(folder, tag)


def _documents(sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and response masks without the padding at the end."""
    lengths = attention_mask.sum(-1).tolist()
    ids = [row[:n] for row, n in zip(sequences, lengths, strict=True)]
    # action_mask[t] belongs to token t + 1: OpenRLHF cuts the first token off
    return ids, [torch.cat([m.new_zeros(1), m])[:n] for m, n in zip(action_mask, lengths, strict=True)]


def _padded(rows: list[Tensor]) -> Tensor:
    """[B, T] on the CPU, zero-padded."""
    return torch.nn.utils.rnn.pad_sequence([row.detach().cpu() for row in rows], batch_first=True)
