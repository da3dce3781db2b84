"""Document, and the packing of documents into one training batch with its alignment worked out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

#: what a document is made of
TENSORS = ("input_ids", "aux", "last", "loss_mask")


@dataclass(frozen=True)
class Document:
    """One rollout with the target's hidden states.

    The draft for position t reads ``aux[t]`` and the embedding of token t + 1, and predicts what the target predicts at
    t + 1: the distribution of token t + 2, whose logits are ``last[t + 1] @ lm_head.T``.
    """

    input_ids: Tensor  # [n] int64
    aux: Tensor  # [n, A * H] hidden states entering the auxiliary layers, ascending
    last: Tensor  # [n, H] output of the target's final norm
    loss_mask: Tensor  # [n] bool, True where the policy sampled the token
    policy_version: int
    offset: int = 0  # tokens of the rollout before the first one here, see ``window``
    embeds: Tensor | None = None  # [n, H] the policy's embeddings of ``input_ids``, where they have been looked up

    def __post_init__(self) -> None:
        """Refuse tensors of different numbers of tokens: they would be misaligned."""
        sizes = [t.shape[0] for t in (self.input_ids, self.aux, self.last, self.loss_mask)]
        if len(set(sizes)) != 1:
            raise ValueError(f"input_ids, aux, last and loss_mask have {sizes} tokens; they must agree")

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes that the four tensors hold."""
        return sum(t.numel() * t.element_size() for t in (self.input_ids, self.aux, self.last, self.loss_mask))

    def with_context(self, share: float) -> Document:
        """The same document, in which tokens that the policy read teach as if it had sampled them.

        The target's distribution is known there as well. Of the tokens before the last sampled one that were not sampled, the
        latest count, ``share`` times as many as were sampled at most.
        """
        sampled = self.loss_mask.to(torch.bool)
        at = sampled.nonzero().squeeze(1)
        if not len(at) or not (most := int(share * len(at))):
            return self
        read = (~sampled[: int(at[-1])]).nonzero().squeeze(1)[-most:]
        mask = sampled.clone()
        mask[read] = True
        return replace(self, loss_mask=mask)

    def window(self, start: int, stop: int, context: int = 0) -> Document:
        """Tokens ``start`` to ``stop``; the hidden states were computed with the whole prefix and stay valid.

        Args:
            start: first token.
            stop: behind the last one.
            context: most tokens before ``start`` that come along as what the draft's attention reads; they teach nothing.
        """
        first = max(0, start - context)
        s = slice(first, stop)
        ids, mask = self.input_ids[s], self.loss_mask[s]
        if first < start:
            mask = mask.clone()
            mask[: start - first] = False
        embeds = None if self.embeds is None else self.embeds[s]
        return Document(ids, self.aux[s], self.last[s], mask, self.policy_version, self.offset + first, embeds)


@dataclass(frozen=True)
class PackedBatch:
    """Documents one after the other, and the rows at which the target teaches.

    A *teacher row* r is a token that the policy sampled and whose successor it sampled too (or so ``with_context`` says):
    there, and only there, the engine may ask the draft for token r + 1. Step j of the unroll reaches row r from the anchor
    r - 1 - j, which counts only if all tokens from the anchor's successor to r + 1 were sampled in the same document, as in the
    engine.
    """

    input_ids: Tensor  # [N] int64
    aux: Tensor  # [N, A * H]
    last: Tensor  # [N, H]
    lengths: tuple[int, ...]  # tokens of each document, sum == N
    rows: Tensor  # [R] int64 teacher rows, ascending
    max_depth: Tensor  # [R] int64: how many steps of the unroll have a valid anchor for the teacher row
    stop: Tensor  # [N] int64: last row of each row's document
    positions: Tensor  # [N] int64: of each token in its rollout
    embeds: Tensor | None = None  # [N, H] as of the documents, if all have them

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    def valid(self, steps: int) -> Tensor:
        """[steps, R] bool: does step j have an anchor for teacher row r."""
        return self.max_depth[None, :] > torch.arange(steps, device=self.max_depth.device)[:, None]

    def counts(self, steps: int) -> Tensor:
        """[steps] float64: valid positions of each step."""
        return self.valid(steps).sum(1).to(torch.float64)

    def next_rows(self, steps: int) -> Tensor:
        """[steps, N] int64: the row of token t + 1 + j, or of the document's last token beyond its end (that never counts)."""
        ahead = torch.arange(1, steps + 1, device=self.stop.device)[:, None]
        row = torch.arange(len(self), device=self.stop.device)[None, :]
        return torch.minimum(row + ahead, self.stop[None, :])

    def embedded(self, embed: Tensor) -> Tensor:
        """[N, H] embeddings of the tokens, by ``embed`` [V, H] unless they have been looked up before."""
        return (F.embedding(self.input_ids, embed) if self.embeds is None else self.embeds).detach()


def trainable_positions(loss_mask: Tensor) -> int:
    """How many teacher rows a document with this loss mask [n] has."""
    mask = loss_mask.to(torch.bool)
    return int((mask[1:-1] & mask[2:]).sum()) if mask.numel() > 2 else 0


def pack(documents: Sequence[Document], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack documents, of which there is one at least, in order, on ``device``; the harvested dtype is kept."""
    lengths = tuple(len(d) for d in documents)
    embeds = [d.embeds for d in documents if d.embeds is not None]
    mask = torch.cat([d.loss_mask.to(torch.bool) for d in documents]).to(device)
    size = torch.tensor(lengths, device=device)
    stops = size.cumsum(0) - 1
    stop = stops.repeat_interleave(size)
    start = (stops - size + 1).repeat_interleave(size)
    row = torch.arange(mask.numel(), device=device)
    offset = torch.tensor([d.offset for d in documents], device=device).repeat_interleave(size)
    # the last row at or before each row at which a chain is cut: an unsampled token, or the document's first token
    cut = torch.where(mask & (row > start), start, row).cummax(0).values
    successor_sampled = mask.roll(-1) & (row < stop)
    rows = (mask & successor_sampled & (row > start)).nonzero().squeeze(1)
    return PackedBatch(
        input_ids=torch.cat([d.input_ids for d in documents]).to(device),
        aux=torch.cat([d.aux for d in documents]).to(device),
        last=torch.cat([d.last for d in documents]).to(device),
        lengths=lengths,
        rows=rows,
        max_depth=(row - cut)[rows],
        stop=stop,
        positions=row - start + offset,
        embeds=torch.cat(embeds).to(device) if len(embeds) == len(documents) else None,
    )


def portions(documents: Sequence[Document], tokens: int) -> Iterator[list[Document]]:
    """Documents in order, in lists of at most ``tokens`` tokens, or of one longer document."""
    part: list[Document] = []
    for document in documents:
        if part and sum(map(len, part)) + len(document) > tokens:
            yield part
            part = []
        part.append(document)
    if part:
        yield part
