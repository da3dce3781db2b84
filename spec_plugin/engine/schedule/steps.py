"""The step log: what the engine's own decoding steps took, noted by the scheduler as it goes. No step is run for it.

A step lasts from one call of ``schedule`` to the next: under synchronous scheduling that is all of it, under asynchronous
scheduling the pace at which steps follow each other. Steps that mix prefill and decoding, or requests with different
numbers of drafted tokens, are not noted, nor is the last one before the engine runs empty.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from spec_plugin.events import StepTiming

_KEPT = 64  # latest steps of one kind; the median is theirs

Kind = tuple[int, int, bool]  # requests, k, was the draft paused


class Timed(NamedTuple):
    """One step that is over."""

    batch: int
    k: int
    paused: bool
    seconds: float
    context: float


class StepLog:
    """Durations of steps by kind, since the last ``take``."""

    def __init__(self, ragged: bool = False) -> None:
        """``ragged``: the method may propose fewer than k tokens for a request, or none."""
        self._timed: dict[Kind, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )  # seconds, context
        self._steps: dict[Kind, int] = defaultdict(int)
        self._open: tuple[float, Kind, float] | None = None
        #: seconds of steps in which some drafted fewer tokens than that
        self._mixed: dict[Kind, float] = defaultdict(float)
        self._open_mixed: tuple[float, Kind] | None = None
        self.ragged = ragged

    def end(self, now: float) -> Timed | None:
        """The step that is open is over; it, if it is of a kind that is noted.

        Args:
            now: ``time.perf_counter()`` when the next call of ``schedule`` began.
        """
        if self._open_mixed is not None:
            begun, kind = self._open_mixed
            self._open_mixed = None
            self._mixed[kind] += now - begun
        if self._open is None:
            return None
        begun, kind, context = self._open
        self._open = None
        self._timed[kind].append((now - begun, context))
        self._steps[kind] += 1
        return Timed(*kind, now - begun, context)

    def begin(self, output: Any, table: Sequence[int], now: float, paused: bool = True) -> None:
        """A step begins, and the one before it is over.

        Args:
            output: vLLM's ``SchedulerOutput``.
            table: k for each batch size.
            now: ``time.perf_counter()`` when ``schedule`` was called.
            paused: is the draft's forward pass left out where no batch size drafts.
        """
        self.end(now)
        kind_now = kind_of(output, table, paused, self.ragged)
        self._open = None if kind_now is None else (now, kind_now, context_of(output))
        # but for requests that drafted fewer tokens, as of a method that proposes up to k
        mixed = kind_of(output, table, paused, ragged=True) if kind_now is None else None
        self._open_mixed = None if mixed is None else (now, mixed)

    def interrupt(self) -> None:
        """Discard the step that is open: the engine may now wait for requests."""
        self._open = self._open_mixed = None

    def take(self) -> list[StepTiming]:
        """Durations since the last call, one ``StepTiming`` for each kind of step; each is returned once."""
        found = []
        # where no step was alike: to the nearest batch that drafts as much
        for kind in self._mixed.keys() - self._timed.keys():
            near = [other for other in self._timed if other[1:] == kind[1:]]
            if near:
                self._mixed[min(near, key=lambda other: abs(other[0] - kind[0]))] += self._mixed[kind]
        for kind, timed in self._timed.items():
            seconds, contexts = zip(*timed, strict=True)
            middle = _trimmed_mean(seconds) if self.ragged and kind[1] else statistics.median(seconds)
            mixed = self._mixed.get(kind, 0.0)
            found.append(StepTiming(*kind, middle, self._steps[kind], statistics.fmean(contexts), mixed))
        self._timed.clear()
        self._mixed.clear()
        self._steps.clear()
        return found


def _trimmed_mean(seconds: Sequence[float]) -> float:
    """Mean without the longest eighth, for steps that verify different numbers of tokens."""
    kept = sorted(seconds)
    return statistics.fmean(kept[: max(1, len(kept) - len(kept) // 8)])


def kind_of(output: Any, table: Sequence[int], paused: bool = True, ragged: bool = False) -> Kind | None:
    """(batch size, k, paused) of a decoding step; None for one that mixes prefill or several k.

    Args:
        output: vLLM's ``SchedulerOutput``.
        table: see ``StepLog.begin``.
        paused: see there.
        ragged: up to k tokens are proposed for each request, often none.
    """
    scheduled, drafted = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if output.scheduled_new_reqs or not scheduled or len(scheduled) >= len(table):
        return None
    k = table[len(scheduled)]
    widths = {r: len(drafted.get(r, ())) for r in scheduled}
    if any(n != widths[r] + 1 or (widths[r] > k if ragged else widths[r] != k) for r, n in scheduled.items()):
        return None
    return len(scheduled), k, paused and not any(table)


def context_of(output: Any) -> float:
    """Mean number of tokens that the requests of a decoding step have in the KV cache."""
    computed = output.scheduled_cached_reqs.num_computed_tokens
    return sum(computed) / len(computed) if computed else 0.0
