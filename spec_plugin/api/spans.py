"""Spans: what an engine knows of each stretch of text that it sampled, kept until the trainer asks.

An asynchronous trainer cuts responses short at a weight sync and lets them go on under the next policy, and on the way to the
loss loses most of what the engine said beside each part. So the engine keeps it: which stretch of which document, by which
policy version, and which tokens of it without drafts. The trainer knows the documents; a fingerprint of all tokens up to the
end of a stretch brings the two together, whoever cut and joined them. Beside it go sums of the log-probs that the engine
stated, each weighed by its place, as every dtype in which a trainer may carry them rounds them: what enters the loss must have
one of these sums, so that none is exchanged, moved or replaced, however long the text is. Where a trainer goes without the
engine's log-probs, its samples must be verified all the same: the last few spans of each engine then hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: spans that an engine keeps at most, until it is asked; and those with log-probs that the trainer did not ask for
KEPT, KEPT_LOG_PROBS = 65_536, 64
#: versions after which nobody will ask for a span any more, and spans of all engines that are remembered at most, about
_VERSIONS, _REMEMBERED = 64, 262_144

#: bits of a mark by which most tokens are told from all ends of spans
_LOW = np.uint64((1 << 22) - 1)
#: in which log-probs may come from the engine to the loss: lists of numbers become the first one in every trainer that we know
CARRIED = (torch.float32, torch.bfloat16, torch.float16)
#: by which two sums of one term may differ, in units of it and for each term: float64 numbers added up in another order
_ORDER = torch.finfo(torch.float64).eps

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
    #: ``weighed`` sum of its log-probs as the engine stated them, carried in each dtype of ``CARRIED``
    stated: tuple[float, ...] | None = None
    #: [until - first] float64 nats, of some spans whose log-probs the trainer did not ask for, in a form that is cheap to send
    log_probs: bytes | None = field(default=None, compare=False)


#: among an engine's spans: there are others, which it has not kept
FORGOTTEN = Span(0, 0, 0, -1, 0, 0)


class Origin(NamedTuple):
    """What engines have said of the tokens of a batch."""

    versions: Tensor  # [B, T] int64 policy version that sampled each token, -1 unknown
    plain: Tensor  # [B, T] bool: known to be sampled without drafts
    sampled: Tensor  # [B, T] bool: by any request that the engines know of
    #: [B] float64 nats by which the weighed sum of a row's log-probs differs from all that any request of its text has stated,
    #: beyond the order in which it is added up; 0: it does not, or is not known
    apart: Tensor


def fingerprints(tokens: Tokens) -> NDArray[np.uint64]:
    """64-bit fingerprints of all beginnings of a document, [n + 1]; two different ones agree by chance in 2^-63 or so.

    Args:
        tokens: [n] token ids.
    """
    ids = np.asarray(tokens, dtype=np.uint64)
    sums = np.zeros(len(ids) + 1, np.uint64)
    with np.errstate(over="ignore"):
        np.cumsum(_mixed(ids + np.uint64(1)) * _weights(len(ids))[0], out=sums[1:])
    return sums


def weighed(log_probs: Sequence[float] | NDArray[np.float64], first: int) -> float:
    """Sum of log-probs, each times a weight of [1, 2) that is its place's, which no exchange or shift leaves as it is.

    Args:
        log_probs: [n] nats, of neighbouring tokens.
        first: place of the first one in its document.
    """
    return float(np.asarray(log_probs, np.float64) @ _weights(first + len(log_probs))[1][first:])


def weighed_as_carried(log_probs: Sequence[float], first: int) -> tuple[float, ...]:
    """``weighed`` sums of log-probs, [n] nats, after rounding to each of ``CARRIED``: equal numbers have equal sums."""
    values = torch.tensor(log_probs, dtype=torch.float64)
    return tuple(weighed(values.to(dtype).double().numpy(), first) for dtype in CARRIED)


def _weights(length: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """What the first places of every document weigh, [length] each: their token ids, odd; their log-probs, in [1, 2)."""
    of_tokens, of_log_probs = _weights_of(1 << max(10, (length - 1).bit_length()))
    return of_tokens[:length], of_log_probs[:length]


@lru_cache(maxsize=4)  # an engine asks for them several times a request
def _weights_of(size: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    of_tokens = _mixed(np.arange(1, size + 1, dtype=np.uint64)) | np.uint64(1)
    return of_tokens, 1.0 + (of_tokens >> np.uint64(11)).astype(np.float64) * 2.0**-53


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
        self.complete = True  # did what was last added have all that the engines had sampled
        #: by the lowest bits of a mark: may a span end with it; most tokens end none, and need not be looked up
        self._maybe = np.zeros(int(_LOW) + 1, bool)

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def add(self, spans: Iterable[Span], policy_version: int) -> None:
        """Take note; what was sampled long before this version is forgotten, and of very many the oldest versions."""
        added, self.complete = [], True
        for span in spans:
            if span == FORGOTTEN:
                self.complete = False
                continue
            same = self._known.setdefault((span.until, span.mark), [])
            if span in same:
                same.remove(span)  # the last one to say so is the newest
            same.append(span)
            self._by_version.setdefault(span.version, {})[span] = None
            added.append(span.mark)
        if self._forget(policy_version - _VERSIONS):
            added = [mark for _, mark in self._known]
            self._maybe[:] = False
        self._maybe[np.array(added, np.uint64) & _LOW] = True

    def _forget(self, oldest: int) -> bool:
        """Forget versions before this one, and as many more as are too many, but never the newest; were there any."""
        kept = before = len(self)
        for version in sorted(self._by_version):
            if version >= oldest and (kept <= _REMEMBERED or version == max(self._by_version)):
                break
            for span in self._by_version.pop(version):
                same = self._known[span.until, span.mark]
                same.remove(span)
                if not same:
                    del self._known[span.until, span.mark]
                kept -= 1
        return kept < before

    def of(
        self,
        documents: Sequence[Tensor],
        starts: Sequence[int],
        mask: Tensor,
        versions: tuple[Tensor, Tensor] | None = None,
        rollout: Tensor | None = None,
    ) -> Origin:
        """What is known of a batch: the version that sampled each token, where it did without drafts, and of which request.

        Where the same text was sampled more than once it is, of those times that lie between the versions that the trainer
        knows of, the oldest (the newest, if it ends the document), and without drafts only what was so each time. Where it
        knows of none it is the time whose log-probs the trainer has, else the last.

        Args:
            documents: token ids of each whole sequence, [n_i].
            starts: where the first column of the batch lies in each document.
            mask: [B, T] bool, whose shape the result has.
            versions: [B] each, that sampled the first and the last token, as the trainer was told; None: it was not.
            rollout: [B, T] log-probs by the engine that the trainer has, rounded to one of ``CARRIED`` on the way at the most;
                None: it has none.
        """
        found = torch.full(mask.shape, -1, dtype=torch.int64)
        plain, sampled = (torch.zeros(mask.shape, dtype=torch.bool) for _ in range(2))
        apart = torch.zeros(len(mask), dtype=torch.float64)
        for row, (document, start) in enumerate(zip(documents, starts, strict=True)):
            between = None if versions is None else (int(versions[0][row]), int(versions[1][row]))
            stated: _Stated | None = None
            for same in self._within(document):
                ends = same[0].until == len(document)
                span = same[-1] if between is None else _of_these(same, *between, ends)
                if rollout is not None:
                    stated = _Stated(rollout[row], mask[row], start) if stated is None else stated
                    nearest = min(reversed(same), key=stated.apart)  # of equal ones the newest
                    span = nearest if between is None else span
                    apart[row] = max(float(apart[row]), stated.beyond(nearest))
                sampled[row, max(0, min(s.first for s in same) - start) : max(0, same[0].until - start)] = True
                found[row, max(0, span.first - start) : max(0, span.until - start)] = span.version
                plain[row, max(0, span.plain_first - start) : max(0, span.plain_until - start)] = True
        return Origin(found, plain, sampled, apart)

    def _within(self, document: Tensor) -> list[list[Span]]:
        """Spans that end in the document, in their order. A step has as many tokens as a million, and this is on its path."""
        if not self._known:
            return []
        marks = fingerprints(document.cpu().numpy())
        likely = np.flatnonzero(self._maybe[marks & _LOW])
        found = (self._known.get(end) for end in zip(likely.tolist(), marks[likely].tolist(), strict=True))
        return [same for same in found if same]


class _Stated:
    """A row's log-probs, and their weighed sums over spans."""

    def __init__(self, log_probs: Tensor, mask: Tensor, start: int) -> None:
        """Take one row, [T], that begins at place ``start`` of its document and was sampled where ``mask`` [T] is True."""
        if log_probs.dtype == torch.float64:  # engines state float32, as lists of numbers
            log_probs = log_probs.float()
        self._values, self._mask, self._start = log_probs.double().cpu().numpy(), mask.cpu().numpy(), start
        self._sums: dict[tuple[int, int], float] = {}  # many requests may have sampled the same text

    def _places(self, span: Span) -> slice:
        return slice(span.first - self._start, span.until - self._start)

    def apart(self, span: Span) -> float:
        """Nats between the weighed sum of its log-probs here and as the engine stated them; infinite if one is not known."""
        if span.stated is None or span.first < self._start or span.until > self._start + len(self._values):
            return math.inf
        ends = span.first, span.until
        if ends not in self._sums:
            self._sums[ends] = weighed(self._values[self._places(span)], span.first)
        return min(abs(stated - self._sums[ends]) for stated in span.stated)

    def beyond(self, span: Span) -> float:
        """What of ``apart`` no order of adding up explains; 0 where not all of its tokens are in the loss."""
        apart, places = self.apart(span), self._places(span)
        if math.isinf(apart) or not self._mask[places].all():
            return 0.0
        values = self._values[places]
        return max(0.0, apart - _ORDER * len(values) * weighed(np.abs(values), span.first))


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
