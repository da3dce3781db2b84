"""The step log: what the engine's own decoding steps took, noted by the scheduler as it goes. No step is run for it.

A step lasts from one call of ``schedule`` to the next: under synchronous scheduling that is all of it, under asynchronous
scheduling the pace at which steps follow each other. What a step of some kind takes is told by steps that are alike: nothing
but decoding, the same number of drafted tokens for all, and not the last one before the engine runs empty. All others are
counted beside them with the requests that had a draft (``MixedSteps``): where one request of the control group is in nearly
every batch, hardly any two steps are alike. Batch sizes are counted by bands, so that a log is small however many requests run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_plugin.events import MixedSteps, StepTiming
from spec_plugin.step_cost.bands import Seen, band_of, mean, middle

_KEPT = 64  # latest steps of one kind; what such a step takes is told by these

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


class _Alike:
    """Steps of one kind and band that were alike."""

    def __init__(self) -> None:
        self.latest: deque[Seen] = deque(maxlen=_KEPT)
        self.steps = self.forwards = 0

    def add(self, batch: int, seconds: float, context: float) -> None:
        self.latest.append(Seen(seconds, batch, context, 1))
        self.steps, self.forwards = self.steps + 1, self.forwards + batch

    def timing(self, k: int, paused: bool, uneven: bool) -> StepTiming:
        found = _without_the_longest(self.latest) if uneven else middle(self.latest)
        return StepTiming(found.batch, k, paused, found.seconds, self.steps, found.context, self.forwards)


class _Sum:
    """Of mixed steps of one kind and band."""

    def __init__(self) -> None:
        self.seconds = self.context = 0.0
        self.steps = self.drafted = self.requests = 0

    def add(self, step: _Open, seconds: float) -> None:
        self.seconds, self.steps = self.seconds + seconds, self.steps + 1
        self.drafted, self.requests = self.drafted + step.drafted, self.requests + step.mixed[0]
        self.context += step.context

    def mixed(self, k: int, prompts: bool) -> MixedSteps:
        batch, context = self.requests / self.steps, self.context / self.steps
        return MixedSteps(batch, k, prompts, self.seconds, self.steps, self.drafted, context)


class StepLog:
    """Durations of steps by kind, since the last ``take``."""

    def __init__(self, ragged: bool = False, dropped: int = 0) -> None:
        """Nothing noted.

        Args:
            ragged: the method may propose fewer than k tokens for a request, or none.
            dropped: tokens of each hit in the prefix cache that vLLM has the request compute anew, for the draft's sake.
        """
        self._alike: dict[Kind, _Alike] = defaultdict(_Alike)  # with the band for the requests
        self._sums: dict[tuple[int, int, bool], _Sum] = defaultdict(_Sum)
        self._past_end: list[int] = []  # by position
        self._busy = 0.0
        self._dropped, self._prompt_tokens, self._recomputed = dropped, 0, 0
        self._open: _Open | None = None
        self.mixed: list[MixedSteps] = []  # beside those that the last ``take`` returned
        self.busy_seconds = 0.0  # of all of these steps
        self.past_end: list[int] = []  # drafted tokens accepted for which a response had no room, by position
        #: read in these steps, and those of them that the prefix cache had
        self.prompt_tokens = self.recomputed_tokens = 0
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
            batch, k, prompts = step.mixed
            self._sums[band_of(batch), k, prompts].add(step, seconds)
            return None
        batch, k, paused = step.kind
        self._alike[band_of(batch), k, paused].add(batch, seconds, step.context)
        return Timed(*step.kind, seconds, step.context)

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
        kind = kind_of(output, table, paused, self.ragged, widths)
        if kind is not None:
            batch, k, _ = kind
            prompts, drafted = False, batch * (k > 0)
        else:  # only such a step may read prompts
            self._read(output, widths)
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

    def accept(self, accepted: int, kept: int) -> None:
        """Of a request so many drafted tokens were accepted, and kept: there the response ended."""
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
        """Durations since the last call, one ``StepTiming`` for each kind of step and band; each is returned once.

        What is not in them is in ``mixed``, ``busy_seconds``, ``past_end``, ``prompt_tokens`` and ``recomputed_tokens``
        until the next call.
        """
        found = [a.timing(k, paused, self.ragged and k > 0) for (_, k, paused), a in self._alike.items()]
        self.mixed = [s.mixed(k, prompts) for (_, k, prompts), s in self._sums.items()]
        self.busy_seconds, self._busy = self._busy, 0.0
        self.past_end = self._past_end
        self.prompt_tokens, self.recomputed_tokens = self._prompt_tokens, self._recomputed
        self._past_end, self._prompt_tokens, self._recomputed = [], 0, 0
        self._alike.clear()
        self._sums.clear()
        return found


def _without_the_longest(seen: Iterable[Seen]) -> Seen:
    """The mean without the longest eighth, for steps that verify different numbers of tokens."""
    ordered = sorted(seen)
    return mean(ordered[: len(ordered) - len(ordered) // 8])


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
