"""OpenRLHF's policy actor, plus harvest in its experience pass, log-prob checks, draft training, refresh and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import ray
import torch
from openrlhf.trainer.ray import ppo_actor
from torch import Tensor

from spec_plugin.adapter import (
    ActorsLink,
    DecoderHarvest,
    PackedShards,
    Reason,
    Responses,
    SpecConfig,
    SpecRun,
    SpecSession,
    TargetInfo,
    actor_group,
    configure_logging,
    find_decoder,
    is_first,
    run_blocking,
)
from spec_plugin_openrlhf import checkpoints
from spec_plugin_openrlhf.ray_classes import undecorated


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
        ring = strategy.ring_attn_group
        shards = None if ring is None else PackedShards(ring)
        harvest = partial(DecoderHarvest, decoder=lambda: find_decoder(self._spec_model), shards=shards)
        self._spec = SpecRun(session, link, harvest, overlaps=strategy.args.train.async_enable)
        resumed = int(self.checkpoint_states.get("global_step", 0))
        self._spec_next_version = resumed
        if resumed:  # the trainer sends the weights before it begins
            self._spec.load(checkpoints.latest(Path(strategy.args.ckpt.path)))
        else:  # the engines have loaded the same checkpoint as the actor
            self._spec_synced()

    @property
    def _spec_model(self) -> Any:
        """The Hugging Face model behind DeepSpeed's engine."""
        return self.actor.model.module

    def _spec_synced(self) -> None:
        version, self._spec_next_version = self._spec_next_version, self._spec_next_version + 1
        model = self._spec_model
        shared = [self._spec_tensor(of) for of in (model.get_input_embeddings(), model.get_output_embeddings())]
        run_blocking(self._spec.weights_synced(version, *shared, copied=True))
        self._spec.harvest.open()  # nothing of OpenRLHF's marks the beginning of the experience pass

    def _spec_tensor(self, module: Any) -> Tensor | None:
        """A copy of a layer's whole weight, if there is room for it; every rank must call it (ZeRO-3 gathers)."""
        zero_3 = self.strategy.args.ds.zero_stage == 3
        with deepspeed.zero.GatheredParameters([module.weight], enabled=zero_3):
            return self._spec.session.copy_of(module.weight)

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The experience pass: harvest on the way."""
        run_blocking(self._spec.rollouts_end())
        with self._spec.micro_batch(lambda: _documents(sequences, action_mask, attention_mask)):
            return super().forward(sequences, action_mask, attention_mask, *args, **kwargs)

    def fit(self, kl_ctl: float = 0) -> dict[str, Any]:
        """Check the log-probs, update the policy, then one slice of draft training.

        Raises:
            LogprobProvenanceError: if a log-prob is not the target's; nothing has entered the loss then.
        """
        items = self.trainer.replay_buffer.items
        stated_in_loss = self.strategy.args.algo.advantage.is_correction_level != "off"
        self._spec.agree()
        recomputed = _padded([item.action_log_probs for item in items])
        self._spec.check(_responses(items, self.strategy.args.data.max_len), recomputed, rollout_in_loss=stated_in_loss)
        status: dict[str, Any] = super().fit(kl_ctl)
        self._spec.policy_updated(self._spec.policy_version)
        # OpenRLHF merges all ranks' dicts, the last one wins: only the rank that knows the engines reports
        return {**status, **self._spec.metrics()}

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
        folder = Path(self.strategy.args.ckpt.path)
        saves = torch.distributed.get_rank() == 0 and not self.disable_ds_ckpt
        if saves:
            self._spec.save(checkpoints.waiting(folder, tag))
        super().save_checkpoint(tag, *args, **kwargs)
        if saves:
            with self._spec.session.guarded(Reason.CHECKPOINT, "save"):
                checkpoints.move_in(folder, tag)


def _documents(sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and response masks without the padding at the end."""
    lengths = attention_mask.sum(-1).tolist()
    ids = [row[:n] for row, n in zip(sequences, lengths, strict=True)]
    # action_mask[t] belongs to token t + 1: OpenRLHF cuts the first token off
    return ids, [torch.cat([m.new_zeros(1), m])[:n] for m, n in zip(action_mask, lengths, strict=True)]


def _responses(items: Sequence[Any], most: int) -> Responses:
    """The replay buffer's sequences as ``Responses``; log-probs [B, T] begin at each document's second token.

    Args:
        items: of the replay buffer.
        most: tokens to which OpenRLHF cuts sequences.
    """
    stated = None if any(i.rollout_log_probs is None for i in items) else _padded([i.rollout_log_probs for i in items])
    starts = [1] * len(items)  # OpenRLHF cuts the first token off
    mask = _padded([item.action_mask for item in items]).bool()
    documents = [item.sequences for item in items]
    cut = torch.tensor([len(d) >= most for d in documents], dtype=torch.bool)
    return Responses(documents, starts, mask, stated, cut=cut)


def _padded(rows: list[Tensor]) -> Tensor:
    """[B, T] on the CPU, zero-padded; [0, 0] of a rank that got none."""
    if not rows:
        return torch.zeros(0, 0)
    return torch.nn.utils.rnn.pad_sequence([row.detach().cpu() for row in rows], batch_first=True)
