"""Parts of documents, drawn so that each token is as likely as any other, however long its document and wherever in it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from draft_training.batch import Document, trainable_positions

#: a document that is at most this share of what is drawn is taken whole or not at all: cut, it would lack its beginning
WHOLE = 1 / 8


@dataclass(frozen=True)
class Part:
    """Tokens ``start`` to ``stop`` of a document."""

    document: Document
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def positions(self) -> int:
        """How many positions it has to learn from."""
        return trainable_positions(self.document.loss_mask[self.start : self.stop])

    def cut(self, context: int = 0) -> Document:
        """A document of these tokens alone, behind ``context`` tokens that teach nothing, see ``Document.window``."""
        whole = self.start == 0 and self.stop == len(self.document)
        return self.document if whole else self.document.window(self.start, self.stop, context)


def stretch(documents: Sequence[Document], tokens: int, rng: random.Random) -> list[Part]:
    """Parts of ``tokens`` tokens at most: a stretch of the documents laid end to end in a ring, in random order.

    Where it begins and ends long documents are cut, short ones (an eighth of it) are not. Parts without a position to learn from
    do not count, and are left out.
    """
    order = list(documents)
    rng.shuffle(order)
    total = sum(map(len, order))
    if total <= tokens:
        return [Part(d, 0, len(d)) for d in order]
    return _from(order, rng.random() * total, tokens, tokens * WHOLE)


def teeth(documents: Sequence[Document], tokens: int, each: int, rng: random.Random) -> list[Part]:
    """Parts of ``tokens`` tokens at most, from many places: stretches of ``each`` tokens at even distances, as of a comb."""
    if tokens <= 0:
        return []
    total = sum(map(len, documents))
    count = math.ceil(tokens / each)
    if total <= tokens:
        found = [Part(d, 0, len(d)) for d in documents]
    else:
        each, phase = tokens // count, rng.random()
        found = [part for i in range(count) for part in _from(documents, (i + phase) * total / count, each, whole=0)]
    return [part for part in found if part.positions]


def _from(ring: Sequence[Document], begin: float, tokens: int, whole: float) -> list[Part]:
    """Once around at most. Documents of up to ``whole`` tokens are not cut."""
    if not ring:
        return []
    first, start = 0, int(begin)
    while start >= len(ring[first]) and first < len(ring) - 1:
        start, first = start - len(ring[first]), first + 1
    if len(ring[first]) <= min(whole, tokens):
        start = 0
    start = min(start, len(ring[first]))
    out: list[Part] = []
    turn = [*((d, 0, len(d)) for d in [*ring[first + 1 :], *ring[:first]]), (ring[first], 0, start)]
    for document, low, high in [(ring[first], start, len(ring[first])), *turn]:
        room = tokens - sum(map(len, out))
        if high - low > room and (len(document) <= whole or room < 3):
            break
        part = Part(document, low, min(high, low + room))
        if part.positions:
            out.append(part)
    return out
