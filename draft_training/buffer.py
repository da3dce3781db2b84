"""HiddenBuffer: the harvested documents that the draft learns from, bounded, newest first, with a share of replay."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from draft_training.batch import TENSORS, Document, trainable_positions
from draft_training.parts import Part, stretch, teeth

#: a document of more than this share of all tokens is only left out in part: see ``without``
_LONG = 1 / 16
#: a token that the policy read counts as so much of one that it sampled: a prompt's names come back in its answers
_READ = 2.0**-20


class HiddenBuffer:
    """Documents in order of arrival, in the host's memory; the oldest leave when tokens or bytes exceed their bounds."""

    def __init__(self, max_tokens: int, max_bytes: int, seed: int) -> None:
        """The bounds hold for what is stored, whatever is added.

        Args:
            max_tokens: most tokens held.
            max_bytes: most bytes held.
            seed: of the buffer's own random stream.
        """
        self.max_tokens, self.max_bytes = max_tokens, max_bytes
        self._rng = random.Random(seed)
        self._documents: deque[Document] = deque()
        self._tokens = self._bytes = 0

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, document: Document, owned: bool = False) -> bool:
        """Take a document into the buffer, and make room for it.

        Of one that alone exceeds a bound, a part that fits is drawn.

        Args:
            document: with its hidden states in the host's memory, or elsewhere.
            owned: its tensors lie in the host's memory, are known to be finite, and nobody else will write to them: they are kept
                as they are. Else they are looked at, and copied.

        Returns:
            False when it was refused: hidden states that are not finite, or no position to learn from.
        """
        size = document.nbytes
        fits = min(self.max_tokens, self.max_bytes * len(document) // max(size, 1))
        if len(document) > fits:
            drawn = stretch([document], fits, self._rng)
            document = max(drawn, key=len).cut() if drawn else document.window(0, 0)
        if trainable_positions(document.loss_mask) == 0:
            return False
        if not owned:
            if not all(bool(torch.isfinite(states).all()) for states in (document.aux, document.last)):
                return False
            with torch.inference_mode(False):  # a harvest under inference mode must still be usable in a backward pass
                copies: dict[str, Any] = {
                    name: getattr(document, name).detach().to("cpu", copy=True).contiguous() for name in TENSORS
                }
                document = replace(document, **copies)
        self._documents.append(document)
        self._tokens += len(document)
        self._bytes += document.nbytes
        while self._tokens > self.max_tokens or self._bytes > self.max_bytes:
            gone = self._documents.popleft()
            self._tokens -= len(gone)
            self._bytes -= gone.nbytes
        return True

    def sample(self, tokens: int, replay_share: float) -> list[Part]:
        """Draw parts of documents of at most ``tokens`` tokens together, without replacement.

        Documents of the newest policy version come first; ``replay_share`` of the tokens is kept for older ones, and
        either kind fills what the other leaves. Of each kind every token is as likely to be drawn as any other, see
        ``parts.stretch``: the hidden states of a part saw the whole prefix, only the draft's own attention is cut there.

        Returns:
            At least one part unless the buffer is empty.
        """
        newest = self.newest_policy_version
        fresh = [d for d in self._documents if d.policy_version == newest]
        older = [d for d in self._documents if d.policy_version != newest]
        replayed = min(int(tokens * replay_share), sum(map(len, older)))
        drawn = stretch(fresh, tokens - replayed, self._rng)
        drawn += stretch(older, tokens - sum(map(len, drawn)), self._rng)
        return drawn or self._anything(tokens)

    def _anything(self, tokens: int) -> list[Part]:
        """Around the first position to learn from of the newest document: where the ends of all draws had none."""
        if not self._documents:
            return []
        document = self._documents[-1]
        mask = document.loss_mask.to(torch.bool)
        first = int((mask[1:-1] & mask[2:]).int().argmax()) + 1  # exists: useless documents are refused
        start = max(0, min(first - 1, len(document) - tokens))
        return [Part(document, start, min(len(document), start + max(3, tokens)))]

    def newest(self, tokens: int, each: int) -> list[Part]:
        """Parts of documents of the newest policy version, of at most ``tokens`` tokens together.

        Args:
            tokens: in all.
            each: tokens of a part, at most: many short ones come from many places.
        """
        version = self.newest_policy_version
        return teeth([d for d in self._documents if d.policy_version == version], tokens, each, self._rng)

    @contextmanager
    def without(self, parts: Sequence[Part]) -> Iterator[None]:
        """In the block the buffer does not hold these parts of its documents; nothing may be added to it there.

        Of a document that is long, as documents of the buffer go, the rest stays: else little would be left.
        """
        removed: dict[int, list[Part]] = {}
        for part in parts:
            removed.setdefault(id(part.document), []).append(part)
        before = self._documents
        self._documents = deque(kept for d in before for kept in self._remaining(d, removed.get(id(d), ())))
        try:
            yield
        finally:
            self._documents = before

    def _remaining(self, document: Document, removed: Sequence[Part]) -> Iterator[Document]:
        if not removed:
            yield document
        elif len(document) > _LONG * self._tokens:
            edges = [0, *(edge for part in sorted(removed, key=lambda p: p.start) for edge in (part.start, part.stop))]
            for start, stop in zip(edges[0::2], [*edges[1::2], len(document)], strict=True):
                if trainable_positions(document.loss_mask[start:stop]):
                    yield document.window(start, stop)

    def token_counts(self, vocabulary: int) -> torch.Tensor:
        """[vocabulary] float64: how often the policy sampled each token of what is held; one that it read counts for little."""
        if not self._documents:
            return torch.zeros(vocabulary, dtype=torch.float64)
        ids = torch.cat([document.input_ids for document in self._documents])
        sampled = torch.cat([document.loss_mask for document in self._documents])
        return torch.bincount(ids, torch.where(sampled.bool(), 1.0, _READ).double(), vocabulary)

    @property
    def newest_policy_version(self) -> int:
        """The highest policy version held, -1 when empty."""
        return max((d.policy_version for d in self._documents), default=-1)

    @property
    def tokens(self) -> int:
        """Tokens of all documents held."""
        return self._tokens

    def state_dict(self) -> dict[str, Any]:
        """The random stream, JSON-serialisable; the documents belong to a policy that has moved on and are not kept."""
        version, numbers, gauss = self._rng.getstate()
        return {"rng": [version, list(numbers), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        version, numbers, gauss = state["rng"]
        self._rng.setstate((version, tuple(numbers), gauss))
