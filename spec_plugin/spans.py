"""Spans: what an engine knows of each stretch of text that it sampled, kept until the trainer asks.

An asynchronous trainer cuts responses short at a weight sync and lets them go on under the next policy, and on the way to the
loss loses most of what the engine said beside each part. So the engine keeps it: which stretch of which document, by which
policy version, and which tokens of it without drafts. The trainer knows the documents; a fingerprint of all tokens up to the
end of a stretch brings the two together, whoever cut and joined them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: that an engine keeps at most, until it is asked
KEPT = 65_536
#: versions after which nobody will ask for a span any more
_VERSIONS = 64

Tokens = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """One request, or what one policy version sampled of it."""

    mark: int  # fingerprint of the document up to ``until``
    first: int  # its first sampled token, counted from the document's first
    until: int  # the one after its last
    version: int  # policy version
    plain_first: int  # tokens that it is known to have sampled without drafts; none if this is ``plain_until``
    plain_until: int


def fingerprints(tokens: Tokens) -> NDArray[np.uint64]:
    """64-bit fingerprints of all beginnings of a document, [n + 1]; two different ones agree by chance in 2^-63 or so.

    Args:
        tokens: [n] token ids.
    """
    ids = np.asarray(tokens, dtype=np.uint64)
    places = np.arange(1, len(ids) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        terms = _mixed(ids + np.uint64(1)) * (_mixed(places) | np.uint64(1))
        sums = np.cumsum(terms, dtype=np.uint64)
    return np.concatenate([np.zeros(1, np.uint64), sums])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (the finalizer of splitmix64: Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = values * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def span_of(prompt: Tokens, response: Tokens, version: int, plain: tuple[int, int] = (0, 0)) -> Span:
    """The span of a request that is complete.

    Args:
        prompt: token ids that it began with.
        response: token ids that it sampled.
        version: policy version that did.
        plain: its tokens from this one on, up to that one, counted from the document's first, were sampled without drafts.
    """
    document = np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])
    mark = int(fingerprints(document)[-1])
    return Span(mark, len(prompt), len(document), version, *plain)


class Spans:
    """What the engines have said so far, for the documents that the trainer gets later."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Span] = {}

    def add(self, spans: Iterable[Span], policy_version: int) -> None:
        """Take note; what was sampled long before this version is forgotten."""
        self._known.update({(s.until, s.mark): s for s in spans})
        oldest = policy_version - _VERSIONS
        if any(s.version < oldest for s in self._known.values()):
            self._known = {key: s for key, s in self._known.items() if s.version >= oldest}

    def of(self, documents: Sequence[Tensor], starts: Sequence[int], mask: Tensor) -> tuple[Tensor, Tensor]:
        """What is known of a batch: the version that sampled each token, and where it did without drafts.

        Args:
            documents: token ids of each whole sequence, [n_i].
            starts: where the first column of the batch lies in each document.
            mask: [B, T] bool, whose shape the result has.

        Returns:
            [B, T] int64 versions, -1 unknown, and [B, T] bool.
        """
        versions = torch.full(mask.shape, -1, dtype=torch.int64)
        plain = torch.zeros(mask.shape, dtype=torch.bool)
        for row, (document, start) in enumerate(zip(documents, starts, strict=True)):
            for span in self._within(document):
                versions[row, max(0, span.first - start) : max(0, span.until - start)] = span.version
                plain[row, max(0, span.plain_first - start) : max(0, span.plain_until - start)] = True
        return versions, plain

    def _within(self, document: Tensor) -> list[Span]:
        marks = fingerprints(document.cpu().numpy()).tolist()
        found = (self._known.get((until, mark)) for until, mark in enumerate(marks))
        return [span for span in found if span is not None]
