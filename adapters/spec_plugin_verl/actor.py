"""What the flag adds to an actor of verl's: harvest in its log-prob pass, log-prob checks, draft training and checkpoints.

A mix-in before the engine class that verl has registered for a backend; what depends on the backend are the methods of
:class:`BackendParts`, one room each in ``backends``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from spec_plugin_verl_check import recurrent
from spec_plugin_verl_check.actors import objections
from spec_plugin_verl_check.options import LEAVE_OUT, lora
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from spec_plugin.actor.control import RolloutControl, run_blocking
from spec_plugin.actor.judged import chosen_to_recompute
from spec_plugin.actor.links import ActorsLink
from spec_plugin.engine.control import plain_tokens
from spec_plugin.events import LogprobBatch, StatedLogprobs
from spec_plugin.refusals import refuse
from spec_plugin.session import SpecSession
from spec_plugin.spans import Spans
from spec_plugin.witness import witnessed
from spec_plugin_verl import batches
from spec_plugin_verl.runtime import RUNTIME


class Harvest(Protocol):
    """What is captured of a log-prob pass; see :class:`spec_plugin.actor.control.RolloutHarvest`."""

    def open(self) -> None:
        """Before the pass (collective)."""

    def close(self) -> None:
        """Behind it, also where it failed."""


class BackendParts:
    """What a mix-in for one backend answers beside ``forward_step``; here for an actor whose ranks all see whole outputs."""

    module: Any

    def spec_dtype(self) -> str:
        """Dtype of the forward pass, as torch names it."""
        raise NotImplementedError

    def spec_harvest(self, control: RolloutControl) -> Harvest:
        """The harvest of this rank."""
        raise NotImplementedError

    def spec_modules(self) -> Sequence[nn.Module]:
        """All that this rank has of the policy."""
        return (self.module,)

    def spec_log_probs(self, output: Mapping[str, Any], data: Any) -> Tensor | None:
        """Log-probs of a pass, nested [B, (L)], one behind each token; None where none were computed (collective)."""
        found: Tensor | None = output.get("model_output", {}).get("log_probs")
        return found

    def spec_reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """What this rank is to log of what the first rank has measured; empty on others (collective)."""
        return metrics


class SpecActor(BackendParts):
    """The actor (and, untouched, any forward-only engine such as the reference policy).

    Runs in the actor process. ``attach`` is called by the rollout adapter once the session exists.
    """

    engine_config: Any
    model_config: Any
    _session: SpecSession | None = None
    _harvest: Harvest | None = None
    _resumed: Path | None = None  # what a session that comes later is to load
    _without_adapter = False  # inside ``disable_adapter``

    def initialize(self) -> None:
        """Build the model as verl does, and be found by the rollout adapter.

        Raises:
            SpecConfigError: naming options of this backend that have not been shown to work.
        """
        if not self.engine_config.forward_only:
            trains_lora = lora(self.model_config) is not None
            refuse(objections(self.engine_config.strategy, self.engine_config, trains_lora), LEAVE_OUT)
        super().initialize()  # type: ignore[misc]
        if not self.engine_config.forward_only:
            RUNTIME.engine = self

    def attach(self, control: RolloutControl) -> None:
        """Start harvesting for this control's session.

        Raises:
            SpecConfigError: if the target keeps recurrent states, and this actor's passes do not leave them right.
        """
        hf, tried = control.session.target.hf_config, control.session.config.recurrent_states == "try"
        packed = bool(self.model_config.use_remove_padding)
        refuse(recurrent.objections(hf, self.engine_config.strategy, packed, tried), LEAVE_OUT)
        self._session = control.session
        self._harvest = self.spec_harvest(control)
        if self._resumed is not None:
            control.session.load(self._resumed)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """verl's stream of weights; where no rollout adapter of ours reads it, its end begins a phase."""
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        if self.engine_config.forward_only or (RUNTIME.control is not None and RUNTIME.standalone is None):
            return weights, peft_config
        if RUNTIME.standalone is None:
            from spec_plugin_verl.standalone import Standalone

            standalone = Standalone(self, self.spec_dtype())
            RUNTIME.standalone, RUNTIME.control = standalone, standalone.control
        return RUNTIME.standalone.tap(weights), peft_config

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Where LoRA is trained verl asks the actor for the reference's log-probs, too: those of the base, not the policy's."""
        self._without_adapter = True
        try:
            with super().disable_adapter():  # type: ignore[misc]
                yield
        finally:
            self._without_adapter = False

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        """The log-prob pass: harvest on the way, then check the log-probs before verl gets them.

        Raises:
            LogprobProvenanceError: if they are not the target's.
        """
        session = self._session
        if session is None or self.engine_config.forward_only or self._without_adapter:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        RUNTIME.finish()
        output = self._harvesting_pass(data, loss_function)
        log_probs = self.spec_log_probs(output, data)
        if log_probs is not None:
            self._check(session, data, log_probs, rollout_in_loss=False)
            RUNTIME.judged.in_pass = True
        return output

    def _harvesting_pass(self, data: Any, loss_function: Any) -> Any:
        assert self._harvest is not None
        self._harvest.open()
        try:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        finally:
            self._harvest.close()

    def _check(
        self, session: SpecSession, data: Any, log_probs: Tensor, rollout_in_loss: bool, chosen_from: int | None = None
    ) -> None:
        sampled, starts, said = batches.sampled(data), batches.starts(data), batches.said(data)
        assert RUNTIME.control is not None
        first, last = batches.versions(said) if RUNTIME.policy_version >= 0 else (None, None)
        batch = LogprobBatch(
            policy_version=RUNTIME.policy_version,
            recomputed=batches.responses(log_probs, data),
            rollout=batches.rollout(data),
            mask=sampled,
            rollout_versions=first,
            last_versions=last,
            speculating=RUNTIME.control.speculating,
            rollout_in_loss=rollout_in_loss,
            plain=plain_tokens(sampled, said, starts),
            ahead=RUNTIME.ahead if rollout_in_loss else 0,  # verl's own pass puts the synced weights back first
        )
        spans = self._spans()
        if RUNTIME.control.lags:
            told = None if first is None or last is None else (first, last)
            versions, plain = spans.of(batches.ids(data), starts, sampled, told)
            drafted = bool((sampled & ~plain).any())
            batch = replace(batch, lag_allowed=True, speculating=drafted, token_versions=versions, plain=plain)
        session.check_logprobs(batch, chosen_from)
        if batch.rollout is None and (known := self._known(batch, data)) is not None:
            session.check_logprobs(known)

    @staticmethod
    def _spans() -> Spans:
        """What the engines say of what they sampled, asked once a step (collective)."""
        assert RUNTIME.control is not None
        if RUNTIME.judged.spans is None:
            RUNTIME.judged.spans = RUNTIME.control.spans()
        return RUNTIME.judged.spans

    @staticmethod
    def _known(batch: LogprobBatch, data: Any) -> LogprobBatch | None:
        """What the engines kept aside (``calculate_log_probs=False``), of this rank's sequences; on the first rank only."""
        assert RUNTIME.control is not None
        link = RUNTIME.control.link
        if not isinstance(link, ActorsLink):
            return None
        known: LogprobBatch | None = None
        with RUNTIME.control.session.guarded("log-probs that the engines kept"):
            kept = [witness for engine in run_blocking(link.all("spec_witnesses")) for witness in engine]
            known = witnessed(batch, batches.ids(data), batches.starts(data), kept)
        return known

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """verl's own update; after the last mini-batch of a step, one slice of draft training and the metrics."""
        session = self._session
        if session is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        if not RUNTIME.judged.in_pass:
            self._check_bypassed(session, data)
        output = super().train_batch(data, loss_function)  # type: ignore[misc]
        if tu.get(data, key="update_lr_scheduler", default=False):
            assert RUNTIME.control is not None
            RUNTIME.step_ended()
            RUNTIME.control.train_draft(RUNTIME.policy_version)
            found = self.spec_reported(session.metrics() if RUNTIME.control.link is not None else {})
            if found:
                # verl averages over the ranks that report; and it flattens every metric over data-parallel ranks and
                # micro-batches, so each must be a list
                output["metrics"].update({name: [value] for name, value in found.items()})
        return output

    def _check_bypassed(self, session: SpecSession, data: Any) -> None:
        """verl was told to skip the log-prob pass (bypass_mode): look at all that the engine stated, and recompute a few.

        Each mini-batch of each step is looked at, which takes no forward pass; a few of its sequences are recomputed once a
        step, before its first update.
        """
        if not RUNTIME.judged.sample:
            RUNTIME.finish()
        self._check_stated(session, data)
        if not RUNTIME.judged.sample:
            self._check_sample(session, data)
            RUNTIME.judged.sample = True

    def _check_stated(self, session: SpecSession, data: Any) -> None:
        rollout = batches.rollout(data)
        assert RUNTIME.control is not None
        if rollout is None:
            return
        first, last = batches.versions(batches.said(data)) if RUNTIME.policy_version >= 0 else (None, None)
        batch = StatedLogprobs(RUNTIME.policy_version, rollout, batches.sampled(data), first, last)
        spans = self._spans()
        if RUNTIME.control.lags:
            told = None if first is None or last is None else (first, last)
            versions, _ = spans.of(batches.ids(data), batches.starts(data), batch.mask, told)
            batch = replace(batch, lag_allowed=True, token_versions=versions)
        session.check_stated(batch)

    def _check_sample(self, session: SpecSession, data: Any) -> None:
        """Verify and harvest on a few sequences, half of them of the control group: they say what rounding and lag explain."""
        sampled = batches.sampled(data)
        plain = plain_tokens(sampled, batches.said(data), batches.starts(data)) & sampled
        rows = chosen_to_recompute(plain.any(-1).tolist(), session.config.bypass_check_sequences)
        few = tu.index_select_tensor_dict(data, torch.tensor(rows))
        tu.assign_non_tensor(few, calculate_entropy=False, micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
        # of an update that distils: no teacher is asked here, and log-probs are computed
        tu.assign_non_tensor(few, distillation_use_topk=False, distillation_only=False)
        with ExitStack() as back:
            for module in self.spec_modules():
                back.callback(module.train, module.training)
                module.eval()
            output = self._harvesting_pass(few, None)
        log_probs = self.spec_log_probs(output, few)
        assert log_probs is not None
        self._check(session, few, log_probs, rollout_in_loss=True, chosen_from=len(data))

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, and the plugins' in ``<local_path>/spec_plugin``."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        if self._session is not None and torch.distributed.get_rank() == 0:
            self._session.save(Path(local_path) / "spec_plugin")

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, and the plugins' where there is one."""
        super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        self._resumed = Path(local_path) / "spec_plugin"
        if self._session is not None:
            self._session.load(self._resumed)
