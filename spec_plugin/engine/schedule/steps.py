"""The step log: what the engine's own decoding steps took, noted by the scheduler as it goes. No step is run for it.

A step lasts from one call of ``schedule`` to the next: under synchronous scheduling that is all of it, under asynchronous
scheduling the pace at which steps follow each other. What a step of some kind takes is told by steps that are alike: nothing
but decoding, the same number of drafted tokens for all, and not the last one before the engine runs empty. All others are
counted beside them with the requests that had a draft (``MixedSteps``): where one request of the control group is in nearly
every batch, hardly any two steps are alike.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spec_plugin.events import MixedSteps, StepTiming

_KEPT = 64  # latest steps of one kind; the median is theirs

Kind = tuple[int, int, bool]  # requests, k, was the draft paused


class Timed(NamedTuple):
    """One step that is over."""

    batch: int
    k: int
    paused: bool
    seconds: float
    context: float


class _Open(NamedTuple):
    """The step that is under way."""

    begun: float
    kind: Kind | None  # None: it is not alike
    mixed: tuple[int, int, bool]  # requests, k, do some of them read their prompt
    drafted: int  # requests that have a draft, or of a ragged method might have one
    context: float


class _Sum:
    """Of mixed steps of one kind."""

    def __init__(self) -> None:
        self.seconds = self.context = 0.0
        self.steps = self.drafted = 0


class StepLog:
    """Durations of steps by kind, since the last ``take``."""

    def __init__(self, ragged: bool = False, dropped: int = 0) -> None:
        """Nothing noted.

        Args:
            ragged: the method may propose fewer than k tokens for a request, or none.
            dropped: tokens of each hit in the prefix cache that vLLM has the request compute anew, for the draft's sake.
        """
        self._timed: dict[Kind, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )  # seconds, context
        self._steps: dict[Kind, int] = defaultdict(int)
        self._sums: dict[tuple[int, int, bool], _Sum] = defaultdict(_Sum)
        self._kept: dict[int, int] = defaultdict(int)  # by requests of the step
        self._past_end: list[int] = []  # by position
        self._busy = 0.0
        self._dropped, self._prompt_tokens, self._recomputed = dropped, 0, 0
        self._open: _Open | None = None
        self.mixed: list[MixedSteps] = []  # beside those that the last ``take`` returned
        self.busy_seconds = 0.0  # of all of these steps
        #: requests of a step, and drafted tokens that all such steps have added to responses
        self.kept: list[tuple[int, int]] = []
        self.past_end: list[int] = []  # drafted tokens accepted for which a response had no room, by position
        self.prompt_tokens = self.recomputed_tokens = (
            0  # read in these steps, and those of them that the prefix cache had
        )
        self.ragged = ragged

    def end(self, now: float) -> Timed | None:
        """The step that is open is over; it, if it is of a kind that is noted.

        Args:
            now: ``time.perf_counter()`` when the next call of ``schedule`` began.
        """
        step, self._open = self._open, None
        if step is None:
            return None
        seconds = now - step.begun
        self._busy += seconds
        if step.kind is None:
            self._add(step, seconds)
            return None
        self._timed[step.kind].append((seconds, step.context))
        self._steps[step.kind] += 1
        return Timed(*step.kind, seconds, step.context)

    def _add(self, step: _Open, seconds: float) -> None:
        found = self._sums[step.mixed]
        found.seconds, found.steps = found.seconds + seconds, found.steps + 1
        found.drafted, found.context = found.drafted + step.drafted, found.context + step.context

    def begin(self, output: Any, table: Sequence[int], now: float, paused: bool = True) -> None:
        """A step begins, and the one before it is over.

        Args:
            output: vLLM's ``SchedulerOutput``.
            table: k for each batch size.
            now: ``time.perf_counter()`` when ``schedule`` was called.
            paused: is the draft's forward pass left out where no batch size drafts.
        """
        self.end(now)
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return  # nothing runs
        widths = _widths(output)
        self._read(output, widths)
        kind = kind_of(output, table, paused, self.ragged, widths)
        if kind is not None:
            batch, k, _ = kind
            prompts, drafted = False, batch * (k > 0)
        else:
            batch = len(scheduled)
            decoding = sum(n == widths[r] + 1 for r, n in scheduled.items())
            prompts = bool(output.scheduled_new_reqs) or decoding < batch
            # what is verified was drafted in the step before, in the batch of then
            k = max(widths.values()) or (table[batch] if batch < len(table) else 0)
            drafted = decoding * (k > 0) if self.ragged else sum(width > 0 for width in widths.values())
        self._open = _Open(now, kind, (batch, k, prompts), drafted, context_of(output))

    def _read(self, output: Any, widths: Mapping[str, int]) -> None:
        """Count the tokens of prompts in a step; of each request that the prefix cache knows a block was dropped."""
        new = {request.req_id for request in output.scheduled_new_reqs}
        for request, tokens in output.num_scheduled_tokens.items():
            self._prompt_tokens += tokens if request in new else max(0, tokens - widths[request] - 1)
        hits = sum(request.num_computed_tokens > 0 for request in output.scheduled_new_reqs)
        self._recomputed += self._dropped * hits

    def accept(self, batch: int, accepted: int, kept: int) -> None:
        """Of a request in a step of so many requests so many drafted tokens were accepted, and kept: there the response ended."""
        self._kept[batch] += kept
        self._past_end += [0] * (accepted - len(self._past_end))
        for position in range(kept, accepted):
            self._past_end[position] += 1

    def interrupt(self, now: float) -> None:
        """The engine may now wait for requests: the open step took what it took until here, which is not what such a step takes.

        Args:
            now: ``time.perf_counter()``.
        """
        if self._open is not None:
            self._open = self._open._replace(kind=None)
            self.end(now)

    def take(self) -> list[StepTiming]:
        """Durations since the last call, one ``StepTiming`` for each kind of step; each is returned once.

        What is not in them is in ``mixed``, ``busy_seconds``, ``kept``, ``past_end``, ``prompt_tokens`` and ``recomputed_tokens``
        until the next call.
        """
        found = []
        for kind, timed in self._timed.items():
            seconds, contexts = zip(*timed, strict=True)
            middle = _trimmed_mean(seconds) if self.ragged and kind[1] else statistics.median(seconds)
            found.append(StepTiming(*kind, middle, self._steps[kind], statistics.fmean(contexts)))
        sums = self._sums.items()
        self.mixed = [MixedSteps(*kind, s.seconds, s.steps, s.drafted, s.context / s.steps) for kind, s in sums]
        self.busy_seconds, self._busy = self._busy, 0.0
        self.kept, self.past_end = sorted(self._kept.items()), self._past_end
        self.prompt_tokens, self.recomputed_tokens = self._prompt_tokens, self._recomputed
        self._past_end, self._prompt_tokens, self._recomputed = [], 0, 0
        self._kept.clear()
        self._timed.clear()
        self._sums.clear()
        self._steps.clear()
        return found


def _trimmed_mean(seconds: Sequence[float]) -> float:
    """Mean without the longest eighth, for steps that verify different numbers of tokens."""
    kept = sorted(seconds)
    return statistics.fmean(kept[: max(1, len(kept) - len(kept) // 8)])


def kind_of(
    output: Any,
    table: Sequence[int],
    paused: bool = True,
    ragged: bool = False,
    widths: Mapping[str, int] | None = None,
) -> Kind | None:
    """(batch size, k, paused) of a decoding step; None for one that mixes prefill or several k.

    Args:
        output: vLLM's ``SchedulerOutput``.
        table: see ``StepLog.begin``.
        paused: see there.
        ragged: up to k tokens are proposed for each request, often none.
        widths: drafted tokens of each request, where they are known already.
    """
    scheduled = output.num_scheduled_tokens
    if output.scheduled_new_reqs or not scheduled or len(scheduled) >= len(table):
        return None
    k = table[len(scheduled)]
    widths = _widths(output) if widths is None else widths
    if any(n != widths[r] + 1 or (widths[r] > k if ragged else widths[r] != k) for r, n in scheduled.items()):
        return None
    return len(scheduled), k, paused and not any(table)


def _widths(output: Any) -> dict[str, int]:
    """Drafted tokens of each request of the step."""
    drafted = output.scheduled_spec_decode_tokens
    return {request: len(drafted.get(request, ())) for request in output.num_scheduled_tokens}


def context_of(output: Any) -> float:
    """Mean number of tokens that the requests of a decoding step have in the KV cache."""
    computed = output.scheduled_cached_reqs.num_computed_tokens
    return sum(computed) / len(computed) if computed else 0.0
