"""HiddenBuffer: the harvested documents that the draft learns from, bounded, newest first, with a share of replay."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draft_training.batch import Document, trainable_positions


class HiddenBuffer:
    """Documents in order of arrival, in the host's memory; the oldest leave when tokens or bytes exceed their bounds."""

    def __init__(self, max_tokens: int, max_bytes: int, seed: int) -> None:
        """The bounds hold for what is stored, whatever is added.

        Args:
            max_tokens: most tokens held.
            max_bytes: most bytes held.
            seed: of the buffer's own random stream.

        Raises:
            ValueError: if a bound is not positive.
        """
        if max_tokens < 1 or max_bytes < 1:
            raise ValueError(f"max_tokens={max_tokens} and max_bytes={max_bytes} must be positive")
        self.max_tokens, self.max_bytes = max_tokens, max_bytes
        self._rng = random.Random(seed)
        self._documents: deque[Document] = deque()
        self._tokens = self._bytes = 0

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, document: Document) -> bool:
        """Copy a document into the buffer, and make room for it.

        A document that alone exceeds a bound is cut to the prefix that fits.

        Returns:
            False when it was refused: hidden states that are not finite, or no position to learn from.
        """
        size = document.nbytes
        fits = min(len(document), self.max_tokens, self.max_bytes * len(document) // max(size, 1))
        cut = document.window(0, fits) if fits < len(document) else document
        if trainable_positions(cut.loss_mask) == 0:
            return False
        if not (_finite(cut.aux) and _finite(cut.last)):
            return False
        with torch.inference_mode(False):  # a harvest under inference mode must still be usable in a backward pass
            kept = Document(
                input_ids=_copy(cut.input_ids),
                aux=_copy(cut.aux),
                last=_copy(cut.last),
                loss_mask=_copy(cut.loss_mask),
                policy_version=cut.policy_version,
                offset=cut.offset,
            )
        self._documents.append(kept)
        self._tokens += len(kept)
        self._bytes += kept.nbytes
        while self._tokens > self.max_tokens or self._bytes > self.max_bytes:
            self._evict()
        return True

    def sample(self, tokens: int, replay_share: float) -> list[Document]:
        """Draw documents of at most ``tokens`` tokens together, without replacement.

        Documents of the newest policy version come first; ``replay_share`` of the tokens is kept for older ones, and
        either kind fills what the other leaves. Where more than half is left, a random window of a longer one is drawn: its
        hidden states saw the whole prefix, only the draft's own attention is cut there.

        Returns:
            At least one document unless the buffer is empty.
        """
        newest = self.newest_policy_version
        fresh = [d for d in self._documents if d.policy_version == newest]
        older = [d for d in self._documents if d.policy_version != newest]
        self._rng.shuffle(fresh)
        self._rng.shuffle(older)
        chosen, left = _fill(fresh, tokens - int(tokens * replay_share) if older else tokens)
        replayed, older_left = _fill(older, tokens - _total(chosen))
        more, rest = _fill(left, tokens - _total(chosen) - _total(replayed))
        drawn = chosen + replayed + more
        room, passed_over = tokens - _total(drawn), rest + older_left
        # else long documents would be left out for as long as there is a short one
        if passed_over and room > tokens // 2:
            drawn.append(self._window(passed_over[0], room))
        return drawn

    def take_newest(self, tokens: int) -> list[Document]:
        """Take out ``newest(tokens)``, of several documents all but one at most; to be given back by ``give_back``."""
        documents = self.newest(tokens)[: max(0, len(self._documents) - 1)]
        taken = {id(d) for d in documents}
        self._documents = deque(d for d in self._documents if id(d) not in taken)
        self._tokens -= _total(documents)
        self._bytes -= sum(d.nbytes for d in documents)
        return documents

    def give_back(self, documents: Sequence[Document]) -> None:
        """Put back what ``take_newest`` took, as the newest; nothing is evicted, since it was within the bounds before."""
        self._documents.extend(reversed(documents))
        self._tokens += _total(documents)
        self._bytes += sum(d.nbytes for d in documents)

    def newest(self, tokens: int) -> list[Document]:
        """Documents of the newest policy version, the last ones first, of at most ``tokens`` tokens together."""
        version = self.newest_policy_version
        return _fill([d for d in reversed(self._documents) if d.policy_version == version], tokens)[0]

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

    def _evict(self) -> None:
        gone = self._documents.popleft()
        self._tokens -= len(gone)
        self._bytes -= gone.nbytes

    def _window(self, document: Document, tokens: int) -> Document:
        """A random window that has something to learn, its first sampled positions included as often as any other."""
        last_start = max(0, len(document) - tokens)
        mask = document.loss_mask.to(torch.bool)
        first = int((mask[1:-1] & mask[2:]).int().argmax()) + 1  # exists: useless documents are refused
        start = self._rng.randint(min(max(0, first + 2 - tokens), last_start), last_start)
        window = document.window(start, start + tokens)
        if trainable_positions(window.loss_mask):
            return window
        start = min(max(0, first + 2 - tokens), last_start)
        return document.window(start, start + tokens)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _total(documents: Sequence[Document]) -> int:
    return sum(len(d) for d in documents)


def _fill(documents: Sequence[Document], tokens: int) -> tuple[list[Document], list[Document]]:
    """Take documents in order while they fit into ``tokens``; returns the taken and the others."""
    taken: list[Document] = []
    left: list[Document] = []
    for document in documents:
        fits = len(document) <= tokens
        (taken if fits else left).append(document)
        tokens -= len(document) if fits else 0
    return taken, left
