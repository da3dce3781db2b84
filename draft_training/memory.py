"""How much memory training a draft takes, counted without doing it; a bound for the peak, see ``training_memory``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draft_training.config import DraftConfig
from draft_training.loss import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CARD
from draft_training.model import Eagle3Draft

#: vocabulary-sized temporaries of the loss that are alive at once: a chunk's own, and the teacher's of the one before
_TEMPORARIES = 6
#: norms of the draft, [H] each: AdamW keeps two numbers for each of theirs, Muon one for each of a matrix's
_NORMS = 4


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the device where the draft is trained."""

    weights: int  # always there
    slices: int  # optimizer state, copies of the policy's tensors and, on a card, harvested documents: needed in slices only
    step: int  # gradients, activations and temporaries: at most, while a step runs

    @property
    def peak(self) -> int:
        """Most bytes at once, which is within a slice of training."""
        return self.weights + self.slices + self.step


def training_memory(
    config: DraftConfig,
    tokens: int,
    steps: int,
    policy_bytes: int,
    tied: bool,
    *,
    on_card: bool = False,
    documents: int = 0,
) -> TrainingMemory:
    """Count what training this draft takes, in float32.

    The step's activations are those that autograd keeps, of a run on tensors without memory; temporaries are bounded.

    Args:
        config: the draft's shape.
        tokens: of one optimizer step, all of one document.
        steps: that the draft is unrolled.
        policy_bytes: of one number of the policy's embedding and LM head as the trainer keeps them.
        tied: are these two one tensor.
        on_card: the embedding lies in the host's memory then, unless it is the head, too; and chunks of logits are larger.
        documents: bytes of the buffer, all of which a slice may bring to a card.
    """
    weights = 4 * config.parameters
    policy = (1 if tied or on_card else 2) * config.vocab_size * config.hidden_size * policy_bytes
    hidden = 2 * 4 * steps * tokens * config.hidden_size  # what the head sees, and its gradient
    batch = (len(config.aux_layers) + 1) * config.hidden_size * tokens * policy_bytes
    vocabulary = 4 * min(CHUNK_ELEMENTS_ON_CARD if on_card else CHUNK_ELEMENTS, tokens * config.draft_vocab_size)
    step = weights + _activations(config, tokens, steps) + hidden + batch + _TEMPORARIES * vocabulary
    head = (
        4 * config.hidden_size * config.draft_vocab_size if config.pruned else 0
    )  # the policy's rows: nothing is kept
    optimizer = weights - head + 4 * _NORMS * config.hidden_size
    return TrainingMemory(weights, optimizer + policy + documents, step)


def _activations(config: DraftConfig, tokens: int, steps: int) -> int:
    """Bytes that autograd keeps of the unrolled draft."""
    draft = Eagle3Draft(config, device="meta")
    aux = torch.empty(tokens, len(config.aux_layers) * config.hidden_size, device="meta")
    embed = torch.empty(tokens, config.hidden_size, device="meta")
    following = torch.empty(steps, tokens, dtype=torch.int64, device="meta")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept += draft.unroll(aux, following, (tokens,), embed, steps)
    counted_elsewhere = {_place(t) for t in (*draft.parameters(), aux, embed)}
    return sum({_place(t): t.untyped_storage().nbytes() for t in kept if _place(t) not in counted_elsewhere}.values())


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
