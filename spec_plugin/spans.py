"""Spans: what an engine knows of each stretch of text that it sampled, kept until the trainer asks.

An asynchronous trainer cuts responses short at a weight sync and lets them go on under the next policy, and on the way to the
loss loses most of what the engine said beside each part. So the engine keeps it: which stretch of which document, by which
policy version, and which tokens of it without drafts. The trainer knows the documents; a fingerprint of all tokens up to the
end of a stretch brings the two together, whoever cut and joined them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: that an engine keeps at most, until it is asked
KEPT = 65_536
#: versions after which nobody will ask for a span any more, and spans of all engines that are remembered at most, about
_VERSIONS, _REMEMBERED = 64, 262_144

#: bits of a mark by which most tokens are told from all ends of spans
_LOW = np.uint64((1 << 22) - 1)

Tokens = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One request, or what one policy version sampled of it."""

    mark: int  # fingerprint of the document up to ``until``
    first: int  # its first sampled token, counted from the document's first
    until: int  # the one after its last
    version: int  # policy version
    plain_first: int  # tokens that it is known to have sampled without drafts; none if this is ``plain_until``
    plain_until: int
    stated: float | None = None  # sum of its log-probs, as the engine stated them


def fingerprints(tokens: Tokens) -> NDArray[np.uint64]:
    """64-bit fingerprints of all beginnings of a document, [n + 1]; two different ones agree by chance in 2^-63 or so.

    Args:
        tokens: [n] token ids.
    """
    ids = np.asarray(tokens, dtype=np.uint64)
    sums = np.zeros(len(ids) + 1, np.uint64)
    with np.errstate(over="ignore"):
        np.cumsum(_mixed(ids + np.uint64(1)) * _weights(len(ids)), out=sums[1:])
    return sums


def _weights(length: int) -> NDArray[np.uint64]:
    """Of the places of a document, [length]: odd, and the same for every document."""
    size = 1 << max(10, (length - 1).bit_length())
    return _weights_of(size)[:length]


@lru_cache(maxsize=4)
def _weights_of(size: int) -> NDArray[np.uint64]:
    places = np.arange(1, size + 1, dtype=np.uint64)
    return _mixed(places) | np.uint64(1)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (the finalizer of splitmix64: Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = values * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def joined(prompt: Tokens, response: Tokens) -> NDArray[np.int64]:
    """A prompt and its response as one document, [n]."""
    return np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])


class Spans:
    """What the engines have said so far, for the documents that the trainer gets later."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[Span]] = {}  # several requests may have sampled the same text
        self._by_version: dict[int, dict[Span, None]] = {}  # the same, in the order in which they came
        #: of ``_known`` and of what was forgotten since they were last gone through, in order
        self._marks: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._maybe = np.zeros(
            int(_LOW) + 1, bool
        )  # by their lowest bits: most tokens end no span, and are seen to at once

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def add(self, spans: Iterable[Span], policy_version: int) -> None:
        """Take note; what was sampled long before this version is forgotten, and of very many the oldest versions."""
        added = []
        for span in spans:
            same = self._known.setdefault((span.until, span.mark), [])
            if span in same:
                same.remove(span)  # the last one to say so is the newest
            same.append(span)
            self._by_version.setdefault(span.version, {})[span] = None
            added.append(span.mark)
        self._forget(policy_version - _VERSIONS)
        if len(self._marks) > 2 * len(self) + KEPT:  # most of them are of what was forgotten
            added, self._marks = [mark for _, mark in self._known], self._marks[:0]
            self._maybe[:] = False
        new = np.sort(np.array(added, np.uint64))
        self._maybe[new & _LOW] = True
        # two sorted runs, which are merged in a time that grows with their length
        self._marks = np.sort(np.concatenate([self._marks, new]), kind="stable")

    def _forget(self, oldest: int) -> None:
        """Versions before this one, and as many more as are too many, but never the newest."""
        kept = len(self)
        for version in sorted(self._by_version):
            if version >= oldest and (kept <= _REMEMBERED or version == max(self._by_version)):
                return
            for span in self._by_version.pop(version):
                same = self._known[span.until, span.mark]
                same.remove(span)
                if not same:
                    del self._known[span.until, span.mark]
                kept -= 1

    def of(
        self,
        documents: Sequence[Tensor],
        starts: Sequence[int],
        mask: Tensor,
        versions: tuple[Tensor, Tensor] | None = None,
        rollout: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What is known of a batch: the version that sampled each token, and where it did without drafts.

        Where the same text was sampled more than once it is, of those times that lie between the versions that the trainer
        knows of, the oldest (the newest, if it ends the document), and without drafts only what was so each time. Where it
        knows of none it is the time whose log-probs the trainer has, else the last.

        Args:
            documents: token ids of each whole sequence, [n_i].
            starts: where the first column of the batch lies in each document.
            mask: [B, T] bool, whose shape the result has.
            versions: [B] each, that sampled the first and the last token, as the trainer was told; None: it was not.
            rollout: [B, T] log-probs by the engine that the trainer has; None: it has none.

        Returns:
            [B, T] int64 versions, -1 unknown, and [B, T] bool.
        """
        found = torch.full(mask.shape, -1, dtype=torch.int64)
        plain = torch.zeros(mask.shape, dtype=torch.bool)
        for row, (document, start) in enumerate(zip(documents, starts, strict=True)):
            between = None if versions is None else (int(versions[0][row]), int(versions[1][row]))
            sums: NDArray[np.float64] | None = None
            for same in self._within(document):
                ends = same[0].until == len(document)
                span = same[-1] if between is None else _of_these(same, *between, ends)
                if between is None and rollout is not None and len(same) > 1:
                    sums = _sums(rollout[row], start) if sums is None else sums
                    span = _nearest(same, sums)
                found[row, max(0, span.first - start) : max(0, span.until - start)] = span.version
                plain[row, max(0, span.plain_first - start) : max(0, span.plain_until - start)] = True
        return found, plain

    def _within(self, document: Tensor) -> list[list[Span]]:
        """Spans that end in the document, in their order. A step has as many tokens as a million, and this is on its path."""
        if not len(self._marks):
            return []
        marks = fingerprints(document.cpu().numpy())
        likely = np.flatnonzero(self._maybe[marks & _LOW])
        places = np.searchsorted(self._marks, marks[likely]).clip(max=len(self._marks) - 1)
        ends = likely[self._marks[places] == marks[likely]]
        found = (self._known.get((int(until), int(marks[until]))) for until in ends)
        return [same for same in found if same]


def _sums(log_probs: Tensor, start: int) -> NDArray[np.float64]:
    """Of a row's log-probs before each place of its document."""
    return np.pad(log_probs.double().cumsum(-1).cpu().numpy(), (start + 1, 0))


def _nearest(same: Sequence[Span], sums: NDArray[np.float64]) -> Span:
    """That whose log-probs are the trainer's; of equal ones the newest."""

    def apart(span: Span) -> float:
        if span.stated is None or span.until >= len(sums):
            return math.inf
        return abs(span.stated - float(sums[span.until] - sums[span.first]))

    return min(reversed(same), key=apart)


def _of_these(same: Sequence[Span], oldest: int, newest: int, ends: bool) -> Span:
    """One for all that sampled the same text, if they did between these versions; if none did, the last one.

    Args:
        same: they.
        oldest: version that sampled the document's first token.
        newest: and its last.
        ends: do they end with that one.
    """
    spans = [span for span in same if oldest <= span.version <= newest]
    if not spans:
        return same[-1]
    version = newest if ends and any(s.version == newest for s in spans) else min(s.version for s in spans)
    spans = [span for span in spans if span.version == version]
    plain_first, plain_until = max(s.plain_first for s in spans), min(s.plain_until for s in spans)
    if plain_first >= plain_until:
        plain_first = plain_until = 0
    first = max(span.first for span in spans)  # what was before is older, and says so itself
    return Span(spans[0].mark, first, spans[0].until, version, plain_first, plain_until)
