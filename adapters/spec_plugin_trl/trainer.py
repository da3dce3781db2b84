"""What spec-plugin needs of one GRPOTrainer or RLOOTrainer: methods around TRL's own of the same names, and callbacks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from spec_plugin.adapter import (
    DecoderHarvest,
    EngineFront,
    InProcessCalls,
    PatchError,
    RanksLink,
    Responses,
    SpecRun,
    SpecSession,
    TargetInfo,
    WrongOrderError,
    actor_group,
    configure_logging,
    find_decoder,
    is_first,
    load_hf_config,
    padded_rows,
    planned_configuration,
    random_streams_kept,
    refuse,
    run_blocking,
    unsupported,
)
from spec_plugin_trl import flag, options

logger = logging.getLogger(__name__)

EXTENSION = "spec_plugin.adapter.SpecWorkerExtension"
FOLDER = "spec_plugin"  # in a checkpoint
#: metrics that are codes, versions and running sums: of several steps the last one's
_NO_MEAN = re.compile(r"spec/(state|reason|on|failed|recoveries|unproven|provenance|\w+_version)$|_so_far_s$")


class TrlRun(TrainerCallback):  # type: ignore[misc]
    """One trainer with one engine in its process; every rank has one."""

    def __init__(self, trainer: Any, generation: Any, run: SpecRun) -> None:
        self.trainer, self.generation, self.run = trainer, generation, run
        self.rolling = False  # is a rollout phase under way
        self.recomputed: Tensor | None = None  # log-probs of the pass before the loss, of the batch that is being made
        self.first: Mapping[str, Any] | None = None  # the batch in the loss, where that recomputes its log-probs first
        self.in_loss = False  # does it
        self.said: Sequence[Sequence[int]] | None = None  # of each completion of that batch: 0 where a tool speaks
        self.unchecked = False  # was a batch generated whose log-probs nobody has shown to ``run.check``
        self.version, self.synced = -1, -1  # of the engine's weights: policy version, and TRL's step
        self.judged = False  # have log-probs been checked since the last slice of draft training
        self.passing = False  # is a log-prob pass under way; where the losses are it, over all losses of a batch
        self.harvesting = ExitStack()

    @classmethod
    def build(cls, trainer: Any, generation: Any, llm: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """The engine of a trainer that is being made, with a draft; the trainer speculates from here on.

        Args:
            trainer: TRL's, whose policy and accelerator are made.
            generation: TRL's ``VLLMGeneration``, which is about to have this engine.
            llm: vLLM's ``LLM``.
            given: TRL's arguments of it.

        Raises:
            SpecConfigError: if the engine would not be lossless.
        """
        configure_logging()
        config, hf = flag.options(), load_hf_config(given["model"], "model")
        found = [
            *options.of_target(given["model"], hf, config)
        ]  # of a model that the script has made; the rest was asked before
        if getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) < 2:
            found.append(unsupported("fsdp_version", 1, "FSDP1 with TRL", "set it to 2"))
        refuse(found, flag.LEAVE_OUT)
        sampling = options.sampling_of(options.field_of(generation))
        dtype = "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else str(trainer.model.dtype)
        target = TargetInfo(
            path=given["model"],
            hf_config=hf,
            sampling=sampling,
            actor_dtype=dtype.removeprefix("torch."),
            actor_group=actor_group(),
            **planned_configuration(given),
        )
        session = SpecSession(config, target)
        processing = trainer.processing_class
        front = EngineFront(session, getattr(processing, "tokenizer", processing))
        calls = InProcessCalls(front, llm(**{**given, **front.engine_arguments(given, EXTENSION)}))
        link = RanksLink(calls, config.refresh_timeout_s)
        harvest = partial(DecoderHarvest, decoder=lambda: find_decoder(trainer.model))
        run = SpecRun(session, link, harvest, sleeps=bool(given.get("enable_sleep_mode")))
        if is_first() and (dropout := _dropout(trainer.model)):
            logger.warning(
                "spec-plugin: the policy drops out (p=%g) where TRL recomputes log-probs, so they are not those of the policy "
                "that sampled, with %s or without. Where that noise is beyond what rounding explains, and plain text of the run "
                "has not shown it yet, the run is stopped: set lora_dropout=0 and disable_dropout=True",
                *(dropout, flag.FLAG),
            )
        trainer._spec = generation._spec = cls(trainer, generation, run)
        trainer.add_callback(trainer._spec)
        return front.engine.llm

    # ---- the engine

    def sync_weights(self, original: Callable[..., Any]) -> None:
        """TRL's weight sync; then the draft's refresh, and rollouts may begin."""
        original()
        step = self.trainer.state.global_step
        if self.rolling and step == self.synced:
            return  # the same weights, of an engine that slept between two turns: not on all ranks, and its draft is there
        embed = head = None
        if self.run.session.method.draft is not None:
            with self.run.session.ledger.spending():
                parts = self._policy.get_input_embeddings(), self._policy.get_output_embeddings()
                embed = self._whole(parts[0])
                head = embed if parts[0].weight is parts[1].weight else self._whole(parts[1])
        if step != self.synced:
            self.version = self.version + 1 if self.synced >= 0 else step // self._steps_of_a_batch
        self.synced = step
        run_blocking(self.run.weights_synced(self.version, embed, head, copied=True))
        self.rolling = True

    @property
    def _steps_of_a_batch(self) -> int:
        """Optimizer steps for which a batch lasts, at least one: policy versions rise by one from batch to batch."""
        args = self.trainer.args
        return max(1, int(args.steps_per_generation * self.trainer.num_iterations // args.gradient_accumulation_steps))

    def _whole(self, module: Any) -> Tensor | None:
        """A copy of a layer's whole weight, if there is room for it (collective: ZeRO-3 and FSDP2 gather)."""
        with self.generation._dist.gather_params([module.weight]):
            weight = module.weight
            if hasattr(weight, "full_tensor"):
                if weight.is_cpu:  # offloaded: collectives need it on the device, as TRL's own do
                    weight = weight.to(self.trainer.accelerator.device)
                weight = weight.full_tensor()
            return self.run.session.copy_of(weight)

    def _unwrapped(self, model: Any) -> Any:
        return self.trainer.accelerator.unwrap_model(model, keep_torch_compile=False)

    @property
    def _policy(self) -> Any:
        return self._unwrapped(self.trainer.model)

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's rollouts; several with the same weights are a phase each."""
        self._begin()
        return original(*args, **kwargs)

    def rollout(self, original: Callable[..., Any], prompts: Any, trainer: Any) -> Any:
        """Those of a ``rollout_func`` of the user's, which asks TRL's engine for what it likes, by ``generate`` or vLLM's own."""
        self._begin()
        found = original(prompts, trainer)
        self.said = found.get("env_mask")  # TRL takes it for the tool mask of its own
        return found

    def _begin(self) -> None:
        if not self.rolling and not getattr(self.generation, "_llm_weights_sleeping", False):  # else TRL syncs first
            run_blocking(self.run.rollouts_begin())
            self.rolling = True
        self.unchecked = self.unchecked or self.trainer.model.training

    # ---- rollouts and their log-probs

    def tool_call_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's turns with tools, whose answers stand in the completions: what they said is not the policy's to learn from."""
        found = original(*args, **kwargs)
        self.said, completions = found[0], found[2]
        if [len(mask) for mask in self.said] != [len(ids) for ids in completions]:
            raise PatchError(
                "trl's GRPOTrainer._tool_call_loop answers something else than a tool mask, completions and their token ids: "
                f"report this; or {flag.LEAVE_OUT}"
            )
        return found

    def generate_and_score_completions(self, original: Callable[..., Any], inputs: Any) -> Any:
        """A batch; its log-probs are checked here, unless TRL leaves it to the loss to recompute them."""
        self._end_pass()
        self.recomputed, self.in_loss, self.said = None, False, None
        function = getattr(self.trainer, "rollout_func", None)  # a script may set it at any time
        if function is not None and getattr(function, "func", None) != self.rollout:
            self.trainer.rollout_func = partial(self.rollout, function)
        output = original(inputs)
        if self.rolling:
            run_blocking(self.run.rollouts_end())
            self.rolling = False
        if self.trainer.model.training:
            recomputed, self.recomputed = self.recomputed, None
            if recomputed is None:
                self.in_loss = True  # the losses' own are checked, and ``on_step_end`` sees to it
                self.unchecked = False
            else:
                self._check(recomputed, output)
        return output

    def compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss; where TRL recomputed no log-probs before, its first pass is the one that is harvested and checked."""
        self.first = inputs if self.in_loss and self.trainer.model.training else None
        try:
            return original(model, inputs, *args, **kwargs)
        finally:
            self.first = None

    def get_per_token_logps_and_entropies(
        self,
        original: Callable[..., Any],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The policy's first pass over a batch: hidden states are harvested on the way, chunk by chunk as TRL cuts it."""
        before_loss = not torch.is_grad_enabled() and self.recomputed is None and options.recomputes(self.trainer)
        in_loss = torch.is_grad_enabled() and self.first is not None
        if (
            not self.trainer.model.training
            or not (before_loss or in_loss)
            or self._unwrapped(model) is not self._policy
        ):
            return original(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        images = [value for value in kwargs.values() if value is not None and not isinstance(value, bool)]
        size = len(input_ids) if images or batch_size is None else batch_size  # images are cut in another way
        if not self.passing:
            self.passing = True
            self.harvesting.enter_context(self.run.logprob_pass())
        parts = []
        for at in range(0, len(input_ids), size):
            ids, mask = input_ids[at : at + size], attention_mask[at : at + size]
            with ExitStack() as stack:
                if not images:
                    stack.enter_context(self._harvested(ids, mask, logits_to_keep, at))
                inner = batch_size if images else None
                parts.append(original(model, ids, mask, logits_to_keep, batch_size=inner, **kwargs))
        found = tuple(_joined(values) for values in zip(*parts, strict=True))
        if in_loss:
            assert self.first is not None
            self._check(found[0].detach(), self.first)
        else:
            self._end_pass()  # the next one may be the reference's
            self.recomputed = found[0]
        return found

    def _harvested(self, ids: Tensor, mask: Tensor, response: int, at: int) -> Any:
        """Around one forward pass over rows [B, T] of which the last ``response`` columns hold the completions.

        Args:
            ids: token ids.
            mask: 0 where there is padding.
            response: columns.
            at: the first row's place in the batch.
        """
        starts, lengths = mask.long().argmax(-1).tolist(), mask.long().sum(-1).tolist()
        return self.run.micro_batch(
            lambda: (_documents(ids, mask), _documents(self._sampled(mask, response, at), mask.cpu())),
            padded_rows(starts, lengths),
        )

    def _sampled(self, mask: Tensor, response: int, at: int) -> Tensor:
        """[B, T] bool on the CPU: where the policy speaks in these rows, and no tool; padding of completions counts, too."""
        found = torch.zeros(mask.shape, dtype=torch.bool)
        completions = found[:, mask.shape[1] - response :].fill_(True)
        marks = self.said if self.first is None else self.first.get("tool_mask")
        for row, of in zip(completions, () if marks is None else marks[at : at + len(mask)], strict=False):
            row[: len(of)] = torch.as_tensor(of, dtype=torch.bool)
        return found

    def _end_pass(self) -> None:
        self.passing = False
        self.harvesting.close()

    def _check(self, recomputed: Tensor, batch: Mapping[str, Any]) -> None:
        """Log-probs [B, T] of a batch of TRL's are about to enter the loss.

        Raises:
            LogprobProvenanceError: if any is not the target's. It stops the run.
        """
        prompt_mask, mask = batch["prompt_mask"].bool(), batch["completion_mask"].bool()
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        documents = [document.cpu() for document in _documents(ids, torch.cat([prompt_mask, mask], 1))]
        cut = None
        if "tool_mask" in batch:
            said = batch["tool_mask"].bool()
            if getattr(
                self.trainer, "tools", None
            ):  # TRL's own loop cuts what comes behind a tool; a user's function is not cut
                cut = (mask.sum(-1) >= self.trainer.max_completion_length) & (mask & ~said).any(-1)
            mask = mask & said
        stated = batch.get("sampling_per_token_logps")
        self.run.check(
            Responses(
                documents,
                prompt_mask.sum(-1).tolist(),
                mask.cpu(),
                None if stated is None else stated.detach().cpu(),
                cut=cut,
            ),
            recomputed.detach().float().cpu(),
            rollout_in_loss=bool(options.rollout_in_loss(options.field_of(self.trainer.args))),
        )
        self.judged, self.unchecked = True, False

    # ---- callbacks of transformers' Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer's step, however many gradients it accumulated: a slice of draft training for each batch."""
        self._end_pass()
        if self.unchecked:
            raise WrongOrderError(
                f"{flag.FLAG}: {type(self.trainer).__name__} trained on rollouts whose log-probs nobody has checked: it replaces "
                f"_generate_and_score_completions, compute_loss or _get_per_token_logps_and_entropies of TRL's without calling "
                f"them. {flag.LEAVE_OUT.capitalize()}, or call super()"
            )
        # What the losses were to check and have not, ``policy_updated`` refuses (law 3).
        if self.judged or self.in_loss:
            self.judged = False
            with random_streams_kept():
                self.run.policy_updated(state.global_step)
            for name, value in self.run.metrics().items():  # TRL logs the mean of what lies here
                if _NO_MEAN.search(name):
                    self.trainer._metrics["train"][name].clear()
                self.trainer._metrics["train"][name].append(value)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """TRL's checkpoint is complete: ours goes into it."""
        if is_first():
            folder = Path(self.trainer._get_output_dir(trial=getattr(self.trainer, "_trial", None)))
            self.run.save(folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FOLDER)

    def load_optimizer_and_scheduler(self, original: Callable[..., Any], checkpoint: str | None) -> None:
        """Load the draft with the optimizer where a run is resumed."""
        original(checkpoint)
        if checkpoint is not None:
            self.run.load(Path(checkpoint) / FOLDER)


def _documents(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row's tokens of [B, T] without its padding."""
    return [row[of.bool()] for row, of in zip(ids, mask, strict=True)]


def _dropout(model: Any) -> float:
    """The largest share that a layer of the policy drops in training."""
    layers = (module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    return max((*layers, float(getattr(model.config, "attention_dropout", 0.0) or 0.0)))


def _joined(parts: tuple[Any, ...]) -> Any:
    """One answer from those of several chunks of a batch: rows one after the other, and the mean of what is one number."""
    if parts[0] is None:
        return None
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).mean()
