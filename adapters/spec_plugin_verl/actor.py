"""verl's FSDP actor engine, plus harvest in its log-prob pass, log-prob checks, draft training and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

from spec_plugin.actor.control import RolloutControl, RolloutHarvest, run_blocking
from spec_plugin.actor.harvest import PackedShards, response_at_the_end
from spec_plugin.actor.links import ActorsLink
from spec_plugin.engine.control import plain_tokens
from spec_plugin.events import LogprobBatch
from spec_plugin.session import SpecSession
from spec_plugin.witness import witnessed
from spec_plugin_verl.runtime import RUNTIME


class SpecFSDPEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """The actor (and, untouched, any forward-only engine such as the reference policy).

    Runs in the actor process. ``attach`` is called by the rollout adapter once the session exists.
    """

    _session: SpecSession | None = None
    _harvest: RolloutHarvest | None = None
    _resumed: Path | None = None  # what a session that comes later is to load

    def initialize(self) -> None:
        """Build the model as verl does, and be found by the rollout adapter."""
        super().initialize()
        if not self.engine_config.forward_only:
            RUNTIME.engine = self

    def attach(self, control: RolloutControl) -> None:
        """Start harvesting for this control's session."""
        self._session = control.session
        model = self.module.get_base_model() if hasattr(self.module, "get_base_model") else self.module  # LoRA wraps it
        shards = PackedShards(self.ulysses_parallel_group) if self.use_ulysses_sp else None
        self._harvest = RolloutHarvest(control, lambda: model.model, shards)
        if self._resumed is not None:
            control.session.load(self._resumed)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """verl's stream of weights; where no rollout adapter of ours reads it, its end begins a phase."""
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        if self.engine_config.forward_only or (RUNTIME.control is not None and RUNTIME.standalone is None):
            return weights, peft_config
        if RUNTIME.standalone is None:
            from spec_plugin_verl.standalone import Standalone

            RUNTIME.standalone = Standalone(self, dtype_name(self))
            RUNTIME.control = RUNTIME.standalone.control
        return RUNTIME.standalone.tap(weights), peft_config

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        """The log-prob pass: harvest on the way, then check the log-probs before verl gets them.

        Raises:
            LogprobProvenanceError: if they are not the target's.
        """
        session = self._session
        if session is None or self.engine_config.forward_only:
            return super().infer_batch(data, loss_function)
        RUNTIME.finish()
        output = self._harvesting_pass(data, loss_function)
        if "log_probs" in output["model_output"]:
            self._check(session, data, output["model_output"]["log_probs"], rollout_in_loss=False)
        return output

    def _harvesting_pass(self, data: Any, loss_function: Any) -> Any:
        assert self._harvest is not None
        self._harvest.open()
        try:
            return super().infer_batch(data, loss_function)
        finally:
            self._harvest.close()

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """One micro-batch; captured while the pass still has harvest budget."""
        if not forward_only or self._harvest is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        with self._harvest.capture(lambda: _documents(micro_batch)):
            return super().forward_step(micro_batch, loss_function, forward_only)

    def _check(self, session: SpecSession, data: Any, log_probs: Tensor, rollout_in_loss: bool) -> None:
        mask = data["response_mask"]
        recomputed = response_from_nested(log_probs, mask)
        rollout = data["rollout_log_probs"] if "rollout_log_probs" in data.keys() else None  # noqa: SIM118
        sampled = _padded(mask).bool()
        assert RUNTIME.control is not None
        first, last = _rollout_versions(data)
        batch = LogprobBatch(
            policy_version=RUNTIME.policy_version,
            recomputed=_padded(recomputed),
            rollout=None if rollout is None else _padded(rollout),
            mask=sampled,
            rollout_versions=first,
            last_versions=last,
            speculating=RUNTIME.control.speculating,
            rollout_in_loss=rollout_in_loss,
            plain=plain_tokens(sampled, _extra_fields(data), _starts(data)),
        )
        spans = RUNTIME.control.spans()
        if RUNTIME.control.lags:
            documents = [d.cpu() for d in data["input_ids"].unbind()]
            told = None if first is None or last is None else (first, last)
            versions, plain = spans.of(documents, _starts(data), sampled, told)
            drafted = bool((sampled & ~plain).any())
            batch = replace(batch, lag_allowed=True, speculating=drafted, token_versions=versions, plain=plain)
        session.check_logprobs(batch)
        if rollout is None and (known := self._known(batch, data)) is not None:
            session.check_logprobs(known)
        RUNTIME.checked_version = RUNTIME.policy_version

    @staticmethod
    def _known(batch: LogprobBatch, data: Any) -> LogprobBatch | None:
        """What the engines kept aside (``calculate_log_probs=False``), of this rank's sequences; on the first rank only."""
        assert RUNTIME.control is not None
        link = RUNTIME.control.link
        if not isinstance(link, ActorsLink):
            return None
        try:
            kept = [witness for engine in run_blocking(link.all("spec_witnesses")) for witness in engine]
        except Exception as error:  # law 6
            RUNTIME.control.session.fail("log-probs that the engines kept", error)
            return None
        return witnessed(batch, [d.cpu() for d in data["input_ids"].unbind()], _starts(data), kept)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """verl's own update; after the last mini-batch of a step, one slice of draft training and the metrics."""
        session = self._session
        if session is None:
            return super().train_batch(data, loss_function)
        if RUNTIME.checked_version != RUNTIME.policy_version:
            self._check_bypassed(session, data)
        output = super().train_batch(data, loss_function)
        if tu.get(data, key="update_lr_scheduler", default=False):
            assert RUNTIME.control is not None
            RUNTIME.control.train_draft(RUNTIME.policy_version)
            if RUNTIME.control.link is not None:
                # verl averages over the ranks that report; and it flattens every metric over data-parallel ranks and
                # micro-batches, so each must be a list
                output["metrics"].update({name: [value] for name, value in session.metrics().items()})
        return output

    def _check_bypassed(self, session: SpecSession, data: Any) -> None:
        """verl was told to skip the log-prob pass (bypass_mode): verify and harvest on a few sequences ourselves.

        Runs before the first update of the step, while the weights are still those that rolled out.
        """
        RUNTIME.finish()
        count = min(len(data), session.config.bypass_check_sequences)
        few = tu.index_select_tensor_dict(data, torch.arange(count))
        tu.assign_non_tensor(few, calculate_entropy=False, micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
        training = self.module.training
        self.module.eval()
        try:
            output = self._harvesting_pass(few, None)
        finally:
            self.module.train(training)
        self._check(session, few, output["model_output"]["log_probs"], rollout_in_loss=True)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, and the plugins' in ``<local_path>/spec_plugin``."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._session is not None and torch.distributed.get_rank() == 0:
            self._session.save(Path(local_path) / "spec_plugin")

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, and the plugins' where there is one."""
        super().load_checkpoint(local_path, *args, **kwargs)
        self._resumed = Path(local_path) / "spec_plugin"
        if self._session is not None:
            self._session.load(self._resumed)


def _documents(micro_batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and response masks of whole sequences."""
    ids, responses = micro_batch["input_ids"].unbind(), micro_batch["response_mask"].unbind()
    return list(ids), [response_at_the_end(len(i), r) for i, r in zip(ids, responses, strict=True)]


def _padded(nested: Tensor) -> Tensor:
    """[B, T] on the CPU, zero-padded, from a jagged tensor."""
    dense: Tensor = nested.to_padded_tensor(0) if nested.is_nested else nested
    return dense.detach().cpu()


def _starts(data: Any) -> list[int]:
    """Where the response begins in each document."""
    documents, responses = data["input_ids"].unbind(), data["response_mask"].unbind()
    return [len(d) - len(r) for d, r in zip(documents, responses, strict=True)]


def _rollout_versions(data: Any) -> tuple[Tensor | None, Tensor | None]:
    """Policy versions that sampled the first and the last token of each sequence; None where verl's batch does not tell."""
    spans = [_span(extra) for extra in _extra_fields(data)]
    if not spans or RUNTIME.policy_version < 0:  # in which case nobody knows what they ought to be
        return None, None
    first, last = torch.tensor(spans, dtype=torch.int64).unbind(1)
    return first, last


def _extra_fields(data: Any) -> list[Any]:
    """What verl's servers said beside each response; empty where verl's batch does not tell."""
    return list(data["extra_fields"]) if "extra_fields" in data.keys() else []  # noqa: SIM118


def _span(extra: Any) -> tuple[int, int]:
    low, high = extra.get("min_global_steps"), extra.get("max_global_steps")
    return (-1, -1) if low is None or high is None else (int(low), int(high))


def dtype_name(engine: Any) -> str:
    """Dtype of the actor's forward pass, as FSDP's mixed precision resolved it."""
    return str(getattr(engine, "_autocast_dtype", torch.bfloat16)).removeprefix("torch.")
