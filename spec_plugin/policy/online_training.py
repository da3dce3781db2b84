"""The draft trainer as a plugin: harvested states fill its buffer, each step gives it a slice of time, each sync its weights."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_training import Document, DraftTrainer, HiddenBuffer, SliceReport, TrainSettings, digest, fingerprint
from draft_training.checkpoint import is_settled
from draft_training.outside import logit_cap
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecPluginError
from spec_plugin.api.events import DraftRefresh, HiddenStates, TargetInfo, WeightSync
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import KNOWS_NOTHING, Method, StartingDraft
from spec_plugin.api.ranks import is_first, on_any_rank, together
from spec_plugin.policy.held_out import EACH, SHARE, HeldOut
from spec_plugin.policy.pace import Pace
from spec_plugin.policy.proposals import Proposals
from spec_plugin.step_cost.chances import tokens_per_step

logger = logging.getLogger(__name__)


#: tokens per draft optimizer step, by device type: a window also bounds the context that the draft's attention learns
TRAIN_TOKENS = defaultdict(lambda: 8192, cpu=512)
#: beside a draft in a checkpoint: the chance of each drafted token that training predicts, so that a resumed run drafts at once
_CHANCES, _TEMPERATURE = "expected_chances", "draft_temperature"
#: share of the first text that an untrained draft is judged on, which it therefore does not train on in that slice
_HELD_BACK = 0.125


def _device(target: TargetInfo, embed: Tensor) -> torch.device:
    """Where the draft is trained: on the actor's card, wherever its weights lay when they were sent."""
    if target.device_type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return embed.device


def documents_of(hidden: HiddenStates) -> list[Document]:
    """The packed documents of a harvest, one by one; views of it."""
    out, begin = [], 0
    for n, offset in zip(hidden.lengths, hidden.offsets or [0] * len(hidden.lengths), strict=True):
        piece = slice(begin, begin + n)
        begin += n
        tensors = (hidden.input_ids[piece], hidden.aux[piece], hidden.last[piece], hidden.loss_mask[piece])
        out.append(Document(*tensors, policy_version=hidden.policy_version, offset=offset))
    return out


def draft_trainer(
    config: SpecConfig, target: TargetInfo, start: StartingDraft, device: torch.device, offload: bool
) -> DraftTrainer:
    """The trainer of a run's draft, with the run's options; it knows no policy yet.

    Args:
        config: the run's options.
        target: the policy, and the group of its actors.
        start: the draft to begin with.
        device: that it is trained on.
        offload: between two slices of training, does what training alone needs lie in host memory.
    """
    settings = TrainSettings(
        lr=config.lr,
        ttt_steps=min(config.k, start.most_unrolled or config.k),
        logit_cap=logit_cap(target.hf_config, target.file),
        tokens_per_step=config.train_tokens or TRAIN_TOKENS[device.type],
        # nobody has taught a policy what follows a placeholder of an image, and the draft sees nothing else of it
        context_share=0.0 if "vision_config" in target.hf_config else TrainSettings.context_share,
        offload=offload,
    )
    group, tensors = target.actor_group, start.tensors
    return DraftTrainer(start.config, settings, device=device, seed=config.seed, process_group=group, tensors=tensors)


class DraftTraining:
    """Trains the method's draft from what the trainer's own forward passes leave, on its own optimizer and random streams."""

    def __init__(self) -> None:
        self._trainer: DraftTrainer | None = None
        self._buffer: HiddenBuffer | None = None
        self._slice: SliceReport | None = None
        self._pace = Pace()
        self._resume_from: Path | None = None
        self._promised: tuple[float, ...] = ()  # of a draft that was resumed, until it is judged anew

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo, method: Method) -> None:
        """Keep the options; the draft is built at the first weight sync, when the policy's embedding is known."""
        self._config, self._target, self._method = config, target, method
        self._begin_to_measure()

    def _begin_to_measure(self) -> None:
        """Nothing is known of the draft yet."""
        self._proposals = Proposals(self._config, self._target, self._method)
        self._held_out = HeldOut(self._proposals)

    @hookimpl(wrapper=True)
    def spec_recover(self) -> Generator[None, Any, Any]:
        """All ranks go on with the first one's draft; where they do not all have one, a new one begins (collective)."""
        with together("begin anew"):
            result = yield
        (lacks,) = on_any_rank(self._trainer is None or self._buffer is None)
        self._slice = None
        self._begin_to_measure()
        self._pace, self._promised = Pace(), ()
        if lacks:
            self._trainer = self._buffer = None
        elif self._trainer is not None:
            self._trainer.follow_first()
        return result

    @hookimpl(wrapper=True)
    def spec_weight_sync(self, event: WeightSync) -> Generator[None, Any, Any]:
        """The draft's embedding and head are the policy's: follow them, when all ranks' other plugins have."""
        with together("take the weight sync"):
            result = yield
        if self._method.draft is not None:
            self._follow(event)
        return result

    def _follow(self, event: WeightSync) -> None:
        if event.embed is None or event.lm_head is None:
            raise SpecPluginError(
                "the weight sync carried no embedding or no LM head, and the draft needs the policy's; expected "
                "tensors [vocabulary, hidden size] whose names end in embed_tokens.weight and lm_head.weight"
            )
        if self._trainer is None:
            self._trainer = self._create(event)
        self._trainer.update_policy(event.embed, event.lm_head, event.policy_version)

    def _create(self, event: WeightSync) -> DraftTrainer:
        assert event.embed is not None
        config, start = self._config, self._method.draft
        assert start is not None
        device = _device(self._target, event.embed)
        trainer = draft_trainer(config, self._target, start, device, offload=device.type == "cuda")
        self._buffer = HiddenBuffer(config.buffer_tokens, config.buffer_mb << 20, config.seed)
        (resumes,) = on_any_rank(is_first() and self._resume_from is not None)
        if resumes:
            saved = trainer.load(self._resume_from or "")  # the first rank reads
            self._promised = tuple(saved.get(_CHANCES, ()))
            self._proposals.resume(saved.get(_TEMPERATURE))
        return trainer

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        """Cut the pack into documents; the buffer copies what it keeps."""
        if self._buffer is None:
            return
        for document in documents_of(hidden):
            self._buffer.add(document, hidden.owned)

    @hookimpl(wrapper=True)
    def spec_train_draft(self, step: int, seconds: float) -> Generator[None, Any, Any]:
        """One slice of at most ``seconds``, when all ranks' other plugins are done."""
        with together("train the draft"):
            result = yield
        self._train(seconds)
        return result

    def _train(self, seconds: float) -> None:
        if self._trainer is None or self._buffer is None or not self._config.train or seconds <= 0:
            return
        with self._trainer.working():
            start = self._method.draft
            if start is not None and start.config.pruned and start.tensors is None:  # a given draft's is its maker's
                self._trainer.select_vocabulary(self._buffer.token_counts(start.config.vocab_size))
            self._train_and_measure(self._trainer, self._buffer, seconds * self._pace.share)

    def _train_and_measure(self, trainer: DraftTrainer, buffer: HiddenBuffer, seconds: float) -> None:
        """One slice, before or behind which the draft is measured (collective, in ``trainer.working``)."""
        began, k, held_out = time.perf_counter(), self._config.k, self._held_out
        tokens, unseen = held_out.tokens(seconds), trainer.draft_version == 0
        knows = not unseen or not self._method.newborn
        if knows and held_out.measure(trainer, k, lambda: buffer.newest(tokens, EACH)) and held_out.report is not None:
            self._pace.judged(held_out.report.acceptance_length, k + 1.0)
        if unseen and not self._method.newborn:
            # by its likeliest tokens: of a flat policy's tokens any draft would draw some
            greedy = held_out.report and replace(held_out.report, draft_temperature=0.0)
            unseen = greedy is not None and greedy.acceptance_length < KNOWS_NOTHING
            if unseen:  # such as a layer that was never trained
                trainer.schedule.newborn = True
        # an untrained draft has seen no text of before: some of the first is kept from it, so that it can be measured at once
        held = buffer.newest(min(tokens, int(_HELD_BACK * buffer.tokens)) if unseen else 0, EACH)
        with buffer.without(held):
            left = (1.0 - SHARE * unseen) * seconds - (time.perf_counter() - began)
            self._slice = trainer.train_slice(buffer, left, self._config.train_max_steps)
        if unseen and trainer.draft_version > 0:
            held_out.measure(trainer, k, lambda: held)

    @hookimpl
    def spec_draft_weights(self, event: WeightSync) -> DraftRefresh | None:
        """The current draft, in the engine's dtype, without anything that the target owns."""
        if self._trainer is None:
            return None
        tensors = self._trainer.engine_tensors(getattr(torch, self._target.dtype))
        return DraftRefresh(
            draft_version=self._trainer.draft_version,
            policy_version=event.policy_version,
            tensors=tensors,
            digest=digest(tensors) if self._config.audit else fingerprint(tensors),
            expected_chances=self._chances,
            draft_temperature=self._proposals.draft_temperature,
        )

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Loss, predicted acceptance and cost of the last slice."""
        if self._slice is None or self._buffer is None or self._trainer is None:
            return {}
        report, done = self._held_out.report, self._slice
        self._slice = replace(done, seconds=0.0, steps=0)  # a step without draft training has had none
        of_text: dict[str, float] = {}
        if report is not None and self._proposals.sampling is not None:
            of_text["spec/entropy"] = report.proposals.mean_entropy
            of_text["spec/ceiling"] = tokens_per_step((*report.proposals.ceiling, 0.0), self._config.k)
        return of_text | {
            "spec/draft_loss": done.loss,
            "spec/draft_temperature": self._proposals.draft_temperature,
            "spec/expected_acceptance": report.acceptance_length if report else 1.0,
            "spec/train_ms": done.seconds * 1e3,
            "spec/train_share": self._config.train_share * self._pace.share,
            "spec/train_steps": float(done.steps),
            "spec/buffer_tokens": float(self._buffer.tokens),
        }

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """Write draft, optimizer, versions and random streams to ``path/draft``; before the first weight sync there is none."""
        if self._trainer is not None:
            about = {_CHANCES: self._chances, _TEMPERATURE: self._proposals.draft_temperature}
            self._trainer.save(path / "draft", about)

    @property
    def _chances(self) -> tuple[float, ...]:
        """The chance of each drafted token to be accepted, by the last measurement, or by that of the run before."""
        return self._held_out.report.chances if self._held_out.report else self._promised

    @hookimpl
    def spec_load(self, path: Path) -> None:
        """Continue where ``spec_save`` left off, at the coming weight sync; a checkpoint without a draft starts a new one."""
        folder = path / "draft"
        if is_settled(folder):
            self._resume_from = folder
        elif is_first():  # another rank may sit on a node that has no folder
            logger.warning(
                "spec-plugin: the checkpoint %s holds no draft, since the run was saved without one: a new one starts",
                path,
            )
