"""What the flag adds to an actor of verl's: harvest in its log-prob pass, log-prob checks, draft training and checkpoints.

A mix-in before the engine class that verl has registered for a backend; what depends on the backend are the methods of
:class:`BackendParts`, one room each in ``backends``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from spec_plugin_verl_check import recurrent
from spec_plugin_verl_check.options import LEAVE_OUT, lora, of_actor
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from spec_plugin.adapter import (
    EngineLink,
    Responses,
    RolloutHarvest,
    SpecRun,
    SpecSession,
    chosen_to_recompute,
    refuse,
    run_blocking,
)
from spec_plugin_verl import batches
from spec_plugin_verl.standalone import Standalone


class BackendParts:
    """What a mix-in for one backend answers beside ``forward_step``; here for an actor whose ranks all see whole outputs."""

    module: Any

    def spec_dtype(self) -> str:
        """Dtype of the forward pass, as torch names it."""
        raise NotImplementedError

    def spec_harvest(self, run: SpecRun) -> RolloutHarvest:
        """Made once, at ``attach``: what captures the hidden states of this rank's log-prob passes."""
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

    Runs in the actor process. In verl's hybrid modes the rollout adapter, made after it in the same process, attaches the
    session; an actor whose engines live in processes of their own does it by itself, at the end of its first weight stream.
    """

    #: verl builds actor and rollout side by side, and tells neither of the other
    of_this_process: ClassVar[SpecActor | None] = None

    engine_config: Any
    model_config: Any
    _run: SpecRun | None = None
    _standalone: Standalone | None = None  # where the engines live in processes of their own
    _resumed: Path | None = None  # what a session that comes later is to load
    _response_length: int | None = None  # to which verl cuts responses
    _without_adapter = False  # inside ``disable_adapter``
    #: of the step in progress: was all of it checked in verl's own log-prob pass; or, where there is none, a sample recomputed
    _passed = _sampled = False

    def initialize(self) -> None:
        """Build the model as verl does, and be found by the rollout adapter.

        Raises:
            SpecConfigError: naming options of this backend that have not been shown to work.
        """
        if not self.engine_config.forward_only:
            trains_lora = lora(self.model_config) is not None
            refuse(of_actor(self.engine_config.strategy, self.engine_config, trains_lora), LEAVE_OUT)
        super().initialize()  # type: ignore[misc]
        if not self.engine_config.forward_only:
            SpecActor.of_this_process = self

    def attach(
        self,
        session: SpecSession,
        link: EngineLink | None,
        *,
        sleeps: bool = False,
        overlaps: bool = False,
        response_length: int | None = None,
    ) -> SpecRun:
        """Begin speculative rollouts for this actor.

        Args:
            session: of this process.
            link: all engines of the run, on the first rank; None on the others.
            sleeps: have the engines no weights in memory when the log-prob pass begins.
            overlaps: do the engines generate while the actor trains.
            response_length: tokens to which verl cuts responses.

        Raises:
            SpecConfigError: if the target keeps recurrent states, and this actor's passes do not leave them right.
        """
        hf, tried = session.target.hf_config, session.config.recurrent_states == "try"
        packed = bool(self.model_config.use_remove_padding)
        refuse(recurrent.objections(hf, self.engine_config.strategy, packed, tried), LEAVE_OUT)
        self._response_length = response_length
        self._run = SpecRun(session, link, harvest=self.spec_harvest, sleeps=sleeps, overlaps=overlaps)
        if self._resumed is not None:
            self._run.load(self._resumed)
        return self._run

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """verl's stream of weights; where no rollout adapter of ours reads it, its end begins a phase."""
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        if self.engine_config.forward_only or (self._run is not None and self._standalone is None):
            return weights, peft_config
        if self._standalone is None:
            self._standalone = Standalone(self.spec_dtype(), partial(self.attach, overlaps=True))
        return self._standalone.tap(weights), peft_config

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
        run = self._run
        if run is None or self.engine_config.forward_only or self._without_adapter:
            return super().infer_batch(data, loss_function)  # type: ignore[misc]
        self._wait()
        with run.logprob_pass():
            output = super().infer_batch(data, loss_function)  # type: ignore[misc]
        log_probs = self.spec_log_probs(output, data)
        if log_probs is not None:
            # verl puts the weights of the last sync back for this pass, however many steps were trained since
            run.check(self._responses(run, data), batches.responses(log_probs, data))
            self._passed = True
        return output

    def _wait(self) -> None:
        """Wait until the thread that begins the phase is done; only standalone engines have one.

        Raises:
            LosslessError: if an engine was found not to sample from the target.
        """
        if self._standalone is not None:
            self._standalone.wait()

    def _responses(self, run: SpecRun, data: Any) -> Responses:
        told = batches.versions(batches.said(data)) if run.policy_version >= 0 else None
        shown = batches.ids(data), batches.starts(data), batches.sampled(data), batches.rollout(data)
        return Responses(*shown, told, batches.cut(data, self._response_length))

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """verl's own update; after the last mini-batch of a step, one slice of draft training and the metrics."""
        run = self._run
        if run is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        if not self._passed:
            self._check_bypassed(run, data)
        output = super().train_batch(data, loss_function)  # type: ignore[misc]
        if tu.get(data, key="update_lr_scheduler", default=False):
            self._passed = self._sampled = False
            run.policy_updated(run.policy_version)
            found = self.spec_reported(run.metrics())
            if found:
                # verl averages over the ranks that report; and it flattens every metric over data-parallel ranks and
                # micro-batches, so each must be a list
                output["metrics"].update({name: [value] for name, value in found.items()})
        return output

    def _check_bypassed(self, run: SpecRun, data: Any) -> None:
        """verl was told to skip the log-prob pass (bypass_mode): look at all that the engine stated, and recompute a few.

        Each mini-batch of each step is looked at, which takes no forward pass; a few of its sequences are recomputed once a
        step, before its first update.
        """
        if not self._sampled:
            self._wait()
            run_blocking(run.rollouts_end())
        responses = self._responses(run, data)
        run.check_stated(responses)
        if not self._sampled:
            self._check_sample(run, data, responses)
            self._sampled = True

    def _check_sample(self, run: SpecRun, data: Any, responses: Responses) -> None:
        """Verify and harvest on a few sequences, half of them of the control group: they say what rounding and lag explain."""
        rows = chosen_to_recompute(run.undrafted(responses).any(-1).tolist(), run.session.config.bypass_check_sequences)
        few = tu.index_select_tensor_dict(data, torch.tensor(rows))
        tu.assign_non_tensor(few, calculate_entropy=False, micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
        # of an update that distils: no teacher is asked here, and log-probs are computed
        tu.assign_non_tensor(few, distillation_use_topk=False, distillation_only=False)
        with ExitStack() as back:
            for module in self.spec_modules():
                back.callback(module.train, module.training)
                module.eval()
            with run.session.ledger.spending(), run.logprob_pass():
                output = super().infer_batch(few, None)  # type: ignore[misc]
        log_probs = self.spec_log_probs(output, few)
        assert log_probs is not None
        chosen, recomputed = self._responses(run, few), batches.responses(log_probs, few)
        run.check(chosen, recomputed, rollout_in_loss=True, current_weights=True, chosen_from=len(data))

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, and the plugins' in ``<local_path>/spec_plugin``."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        if self._run is not None and torch.distributed.get_rank() == 0:
            self._run.save(Path(local_path) / "spec_plugin")

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint, and the plugins' where there is one."""
        super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        self._resumed = Path(local_path) / "spec_plugin"
        if self._run is not None:
            self._run.load(self._resumed)
