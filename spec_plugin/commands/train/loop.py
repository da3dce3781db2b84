"""The training of ``spec-plugin train``: a run's own capture, buffer and training loop, over rollouts on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from draft_training import Document, DraftTrainer, HiddenBuffer, TrainSettings
from draft_training.checkpoint import replacing_folder
from draft_training.outside import logit_cap
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.commands.train.settings import PretrainSettings
from spec_plugin.commands.train.texts import TokenizedRollout
from spec_plugin.policy.online_training import TRAIN_TOKENS, documents_of
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
    start, layers = method.draft, method.harvest or ()
    assert start is not None, method.name
    source = _HiddenStateSource(model, layers, training)
    trainer = _trainer(settings, start, device, model, training)
    visits = math.ceil(settings.steps / _STEPS)
    done = 0
    buffer = _buffer(settings)
    if (work / "trainer").exists():
        extra = trainer.load(work / "trainer")
        trainer.update_policy(*_heads(model), 0)
        done = int(extra["visits"])
        source.refill(buffer, done)
        buffer.load_state_dict(extra["buffer"])
    saved, acceptance = time.monotonic(), 1.0
    with _bar(visits, done, show) as report_progress:
        for visit in range(done, visits):
            source.give(buffer, visit)
            trainer.schedule.scale = min(1.0, (visits - visit) / max(1.0, _COOLING * visits))
            report = trainer.train_slice(buffer, math.inf, min(_STEPS, settings.steps - visit * _STEPS))
            acceptance = report.acceptance_length
            report_progress(visit + 1, f"{acceptance:.2f} of {trainer.schedule.shallow + 1}")
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
        stride = next(s for s in range(max(1, int(0.618 * len(parts))), len(parts) + 2) if math.gcd(s, len(parts)) == 1)
        self._parts = [parts[i * stride % len(parts)] for i in range(len(parts))]  # short and long ones mixed

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


def _trainer(
    settings: PretrainSettings,
    start: StartingDraft,
    device: torch.device,
    model: Any,
    training: Sequence[TokenizedRollout],
) -> DraftTrainer:
    how = TrainSettings(
        ttt_steps=settings.k,
        logit_cap=logit_cap(model.config.to_dict()),
        tokens_per_step=settings.train_tokens or TRAIN_TOKENS[device.type],
    )
    trainer = DraftTrainer(start.config, how, device=device, seed=settings.seed, tensors=start.tensors)
    trainer.update_policy(*_heads(model), 0)
    if start.config.pruned and start.tensors is None:
        sampled = torch.tensor([token for r in training for token in r.response])
        trainer.select_vocabulary(torch.bincount(sampled, minlength=start.config.vocab_size))
    return trainer


def _heads(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def _buffer(settings: PretrainSettings) -> HiddenBuffer:
    defaults = SpecConfig.parse({})
    return HiddenBuffer(defaults.buffer_tokens, defaults.buffer_mb << 20, settings.seed)


@contextmanager
def _bar(visits: int, done: int, show: bool) -> Iterator[Any]:
    columns = (TextColumn("training the draft"), BarColumn(), TextColumn("tokens a step {task.fields[length]}"))
    with Progress(*columns, TimeRemainingColumn(), disable=not show) as progress:
        bar = progress.add_task("train", total=visits, completed=done, length="–")
        yield lambda visit, length: progress.update(bar, completed=visit, length=length)
