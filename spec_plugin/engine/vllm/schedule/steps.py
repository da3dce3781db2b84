"""The step log: what the engine's own decoding steps took, noted by the scheduler as it goes. No step is run for it.

A step lasts from one call of ``schedule`` to the next: under synchronous scheduling that is all of it, under asynchronous
scheduling the pace at which steps follow each other. What a step of some kind takes is told by steps that are alike: nothing
but decoding, the same number of drafted tokens for all, and not the last one before the engine runs empty. All others are
counted beside them with the requests that had a draft: where one request of the control group is in nearly every batch, hardly
any two steps are alike. Batch sizes are counted by bands, so that a log is small however many requests run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_plugin.api.events import StepTiming
from spec_plugin.step_cost.bands import Seen, band_of, mean, middle

_KEPT = 64  # latest steps of one kind; what such a step takes is told by these


class Kind(NamedTuple):
    """What the steps that are counted together have in common, beside the band of their batch sizes."""

    k: int  # where they are not alike, most tokens that a request drafted, or would have by the table
    paused: bool
    alike: bool
    prompts: bool  # did some of the requests read their prompt


class Timed(NamedTuple):
    """One step that is over."""

    batch: int
    k: int
    seconds: float


class _Open(NamedTuple):
    """The step that is under way."""

    begun: float
    batch: int
    kind: Kind
    drafted: int  # requests that have a draft, or of a variable-length method might have one
    context: float


class _Steps:
    """Steps of one kind and band."""

    def __init__(self) -> None:
        self.latest: deque[Seen] = deque(maxlen=_KEPT)
        self.all = Seen(0.0, 0, 0.0, 0)
        self.drafted = 0

    def add(self, step: _Open, seconds: float) -> None:
        one = Seen(seconds, step.batch, step.context, 1)
        self.latest.append(one)
        self.all = Seen(*(before + now for before, now in zip(self.all, one, strict=True)))
        self.drafted += step.drafted

    def timing(self, kind: Kind, uneven: bool) -> StepTiming:
        steps, forwards = int(self.all.steps), int(self.all.batch)
        if not kind.alike:
            found = Seen(*(x / steps for x in self.all))
        else:
            found = _without_the_longest(self.latest) if uneven else middle(self.latest)
        counts = steps, found.context, forwards, self.drafted
        return StepTiming(found.batch, kind.k, kind.paused, found.seconds, *counts, kind.alike, kind.prompts)


class StepLog:
    """Durations of steps by kind, since the last ``take``."""

    def __init__(self, variable_length: bool = False, dropped: int = 0) -> None:
        """Nothing noted.

        Args:
            variable_length: the method may propose fewer than k tokens for a request, or none.
            dropped: tokens of each hit in the prefix cache that vLLM has the request compute anew, for the draft's sake.
        """
        self._steps: dict[tuple[int, Kind], _Steps] = defaultdict(_Steps)  # by band and kind
        self._past_end: list[int] = []  # by position
        self._busy = 0.0
        self._dropped, self._prompt_tokens, self._recomputed = dropped, 0, 0
        self._open: _Open | None = None
        self.busy_seconds = 0.0  # of all steps that the last ``take`` returned
        self.past_end: list[int] = []  # drafted tokens accepted for which a response had no room, by position
        #: read in these steps, and those of them that the prefix cache had
        self.prompt_tokens = self.recomputed_tokens = 0
        self.variable_length = variable_length

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
        self._steps[band_of(step.batch), step.kind].add(step, seconds)
        return Timed(step.batch, step.kind.k, seconds) if step.kind.alike else None

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
        batch = len(scheduled)
        found = kind_of(output, table, paused, self.variable_length, widths)
        if found is not None:
            kind = Kind(*found[1:], True, False)
            drafted = batch * (kind.k > 0)
        else:  # only such a step may read prompts
            self._read(output, widths)
            decoding = sum(n == widths[r] + 1 for r, n in scheduled.items())
            # what is verified was drafted in the step before, in the batch of then
            k = max(widths.values()) or (table[batch] if batch < len(table) else 0)
            kind = Kind(k, False, False, bool(output.scheduled_new_reqs) or decoding < batch)
            drafted = decoding * (k > 0) if self.variable_length else sum(width > 0 for width in widths.values())
        self._open = _Open(now, batch, kind, drafted, context_of(output))

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
            self._open = self._open._replace(kind=self._open.kind._replace(paused=False, alike=False))
            self.end(now)

    def take(self) -> list[StepTiming]:
        """Steps since the last call, one ``StepTiming`` for each kind and band; each is returned once.

        What is not in them is in ``busy_seconds``, ``past_end``, ``prompt_tokens`` and ``recomputed_tokens`` until the next
        call.
        """
        found = [steps.timing(kind, self.variable_length and kind.k > 0) for (_, kind), steps in self._steps.items()]
        self.busy_seconds, self._busy = self._busy, 0.0
        self.past_end = self._past_end
        self.prompt_tokens, self.recomputed_tokens = self._prompt_tokens, self._recomputed
        self._past_end, self._prompt_tokens, self._recomputed = [], 0, 0
        self._steps.clear()
        return found


def _without_the_longest(seen: Iterable[Seen]) -> Seen:
    """The mean without the longest eighth, for steps that verify different numbers of tokens."""
    ordered = sorted(seen)
    return mean(ordered[: len(ordered) - len(ordered) // 8])


def kind_of(
    output: Any,
    table: Sequence[int],
    paused: bool = True,
    variable_length: bool = False,
    widths: Mapping[str, int] | None = None,
) -> tuple[int, int, bool] | None:
    """(batch size, k, paused) of a decoding step; None for one that mixes prefill or several k.

    Args:
        output: vLLM's ``SchedulerOutput``.
        table: see ``StepLog.begin``.
        paused: see there.
        variable_length: up to k tokens are proposed for each request, often none.
        widths: drafted tokens of each request, where they are known already.
    """
    scheduled = output.num_scheduled_tokens
    if output.scheduled_new_reqs or not scheduled or len(scheduled) >= len(table):
        return None
    k = table[len(scheduled)]
    widths = _widths(output) if widths is None else widths
    if any(n != widths[r] + 1 or (widths[r] > k if variable_length else widths[r] != k) for r, n in scheduled.items()):
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
