"""The training of ``spec-plugin train``: a run's own capture, buffer and training loop, over rollouts on disk."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draft_training import Document, HiddenBuffer
from draft_training.checkpoint import replacing_folder
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.commands.terminal import progress_bar
from spec_plugin.commands.train.settings import PretrainSettings
from spec_plugin.commands.train.texts import TokenizedRollout
from spec_plugin.policy.online_training import documents_of, draft_trainer
from spec_plugin.trainer.decoder import find_decoder, load_policy
from spec_plugin.trainer.harvest import harvested, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.taps import Taps

#: rollouts of one forward pass, and optimizer steps after it; a run takes about as many a step
_BATCH, _STEPS = 32, 8
#: share of the steps, at the end, in which the learning rate falls to zero: unlike a run, this has an end
_COOLING = 0.2
#: seconds between two checkpoints: what a kill costs at most
_SAVE_EVERY = 30.0


def train(
    settings: PretrainSettings,
    target: TargetInfo,
    method: Method,
    training: Sequence[TokenizedRollout],
    held_out: Sequence[TokenizedRollout],
    work: Path,
    show: bool,
) -> tuple[float, ...]:
    """Train into ``work/draft``, going on behind the last checkpoint in ``work/trainer``.

    Returns:
        [k] the chance of each drafted token, given those before it, on the held-out rollouts.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, target.dtype) if device.type == "cuda" else torch.float32
    model = _policy(settings.target, dtype).to(device).eval()
    start, layers, config = method.draft, method.harvest or (), settings.spec
    assert start is not None, method.name
    source = _HiddenStateSource(model, layers, training)
    trainer = draft_trainer(config, target, start, device, offload=False)
    trainer.update_policy(*_heads(model), 0)
    if start.config.pruned and start.tensors is None:
        sampled = torch.tensor([token for rollout in training for token in rollout.response])
        trainer.select_vocabulary(torch.bincount(sampled, minlength=start.config.vocab_size))
    visits, done = math.ceil(settings.steps / _STEPS), 0
    buffer = HiddenBuffer(config.buffer_tokens, config.buffer_mb << 20, config.seed)
    if (work / "trainer").exists():
        extra = trainer.load(work / "trainer")
        trainer.update_policy(*_heads(model), 0)
        done = int(extra["visits"])
        source.refill(buffer, done)
        buffer.load_state_dict(extra["buffer"])
    saved = time.monotonic()
    with progress_bar("training the draft", visits, show, done) as show_done:
        for visit in range(done, visits):
            source.give(buffer, visit)
            trainer.schedule.scale = min(1.0, (visits - visit) / max(1.0, _COOLING * visits))
            report = trainer.train_slice(buffer, math.inf, min(_STEPS, settings.steps - visit * _STEPS))
            length = f"{report.acceptance_length:.2f} of {trainer.schedule.shallow + 1}"
            show_done(visit + 1, f"tokens a step {length}")
            if time.monotonic() - saved > _SAVE_EVERY:
                trainer.save(work / "trainer", {"visits": visit + 1, "buffer": buffer.state_dict()})
                saved = time.monotonic()
    trainer.save(work / "trainer", {"visits": visits, "buffer": buffer.state_dict()})
    chances = trainer.evaluate(_HiddenStateSource(model, layers, held_out).all(), steps=settings.k).chances
    with replacing_folder(work / "draft") as folder:
        trainer.kind.write(folder, trainer.engine_tensors(getattr(torch, target.dtype)))
    return chances


def _policy(folder: Path, dtype: torch.dtype) -> Any:
    try:
        return load_policy(folder, dtype)
    except Exception as error:  # transformers raises what it likes
        reason = " ".join(str(error).split())
        raise SpecConfigError(
            f"--target {folder}: its weights cannot be loaded: {type(error).__name__}: {reason:.300}; give a whole checkpoint"
        ) from error


class _HiddenStateSource:
    """Rollouts whose hidden states are computed when they are needed: they take a thousand times the room of the text."""

    def __init__(self, model: Any, aux_layers: Sequence[int], rollouts: Sequence[TokenizedRollout]) -> None:
        self._model, self._taps = model, Taps.of(find_decoder(model), aux_layers)
        # similar lengths together, so that little is padded
        order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].prompt) + len(rollouts[i].response))
        parts = [[rollouts[i] for i in order[at : at + _BATCH]] for at in range(0, len(order), _BATCH)]
        random.Random(0).shuffle(parts)  # short and long ones in turn
        self._parts = parts

    def give(self, buffer: HiddenBuffer, visit: int) -> None:
        """Add the hidden states of the batch that is due at this visit; batches repeat in turn."""
        for document in self._harvested(self._parts[visit % len(self._parts)]):
            buffer.add(document)

    def refill(self, buffer: HiddenBuffer, visits: int) -> None:
        """Fill the buffer as it was after so many visits."""
        tokens, first = 0, visits
        while first > 0 and tokens < buffer.max_tokens:
            first -= 1
            tokens += sum(len(r.prompt) + len(r.response) for r in self._parts[first % len(self._parts)])
        for visit in range(first, visits):
            self.give(buffer, visit)

    def all(self) -> list[Document]:
        """The hidden states of every rollout."""
        return [document for part in self._parts for document in self._harvested(part)]

    @torch.no_grad()
    def _harvested(self, part: Sequence[TokenizedRollout]) -> list[Document]:
        ids = [torch.tensor([*r.prompt, *r.response]) for r in part]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self._model.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(padded.device)
        with self._taps.attached():
            self._model.base_model(input_ids=padded, attention_mask=mask, use_cache=False)
        masks = responses_at_the_end(ids, [len(r.response) for r in part])
        hidden = harvested(self._taps, (ids, masks), HarvestPlan(1 << 62))
        return [] if hidden is None else documents_of(hidden)


def _heads(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
