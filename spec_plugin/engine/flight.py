"""The requests of one engine: how many, how long, and which policy version sampled which of their tokens.

A trainer with partial rollouts pauses its engines for a weight sync and keeps what is in flight, which goes on under the next
policy: one response is then of several versions. The engine's core knows how far each request had come
(``spec_plugin.engine.vllm.schedule.utilities``); here its response is cut there.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from spec_plugin.api.events import UNKNOWN
from spec_plugin.api.spans import FORGOTTEN, KEPT, Span, fingerprints, joined, weighed_as_carried
from spec_plugin.engine.control_group import ControlStretch
from spec_plugin.engine.vllm.schedule.utilities import NUMBER


@dataclass(frozen=True)
class Stretch:
    """Tokens [first, until) of a response, sampled by one policy version."""

    first: int
    until: int
    version: int
    drafted: bool  # did the engine draft in that phase


@dataclass
class Request:
    """One request in flight; the adapter fills in ``tokens`` when it is complete."""

    number: int
    version: int  # that samples now
    tokens: int = 0
    counted: int = 0  # of them in phases before this one
    lost: bool = False  # the core did not say how many tokens it had at the last weight sync
    over: tuple[int, bool] | None = (
        None  # it was complete at a weight sync already: version until then, and did it draft
    )
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def extra_args(self) -> dict[str, int]:
        """For ``SamplingParams``, so that the engine's core knows it, too."""
        return {NUMBER: self.number}

    def cut(self, tokens: int, version: int, drafted: bool) -> None:
        """End a stretch at ``tokens`` (sampled so far in all): those since the last cut are of ``version``."""
        first = self.stretches[-1].until if self.stretches else 0
        if tokens > first:
            known = not self.lost and version == self.version
            self.stretches.append(Stretch(first, tokens, version if known else UNKNOWN, drafted))
        self.lost = False

    def continue_under(self, version: int) -> None:
        """After a weight sync; a request that was complete before it keeps its version."""
        if self.over is None:
            self.version = version


class Clock:
    """Seconds in which at least one request ran."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def run(self, running: bool) -> None:
        """Start or stop the clock; no effect if it already runs, or stands."""
        now = time.perf_counter()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if running else None

    def reset(self) -> None:
        """To zero; a running clock goes on running."""
        self.run(self._since is not None)
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Total since the last reset, the present run included."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)


class RequestTracker:
    """The requests of one engine that are in flight, and what was sampled by which version."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._in_flight: dict[int, Request] = {}
        self._paused = False
        self._clock = Clock()
        self._spans: deque[Span] = deque(maxlen=KEPT)
        self.requests = self.tokens = 0  # complete, and sampled, since the phase began

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._in_flight)

    @property
    def seconds(self) -> float:
        """Since the phase began, with at least one request in flight and the engine not paused."""
        return self._clock.seconds

    def begin(self, version: int | None = None) -> None:
        """Counters and clock start anew; what a paused engine has in flight goes on under this policy version."""
        self._clock.reset()
        self.requests = self.tokens = 0
        if self._paused and version is not None:
            for request in self._in_flight.values():
                request.continue_under(version)

    @contextmanager
    def request(self, version: int) -> Iterator[Request]:
        """Count and time one request, whose first token ``version`` samples."""
        request = Request(next(self._numbers), version)
        self._in_flight[request.number] = request
        self._clock.run(not self._paused)
        try:
            yield request
        finally:
            del self._in_flight[request.number]
            self._clock.run(bool(self._in_flight) and not self._paused)
        self.requests += 1
        self.tokens += request.tokens - request.counted

    def pause(self, sampled: Mapping[int, int] | None, version: int, drafted: bool) -> None:
        """The engine is paused for new weights.

        Args:
            sampled: tokens of each request, by its number, that this version and those before it have sampled; None: not
                known. A request that is missing is complete, and on its way here.
            version: policy version until now.
            drafted: did the engine draft in the phase that ends.
        """
        self._paused = True
        self._clock.run(False)
        for number, request in self._in_flight.items():
            if sampled is None:
                request.lost = True
            elif number in sampled:
                request.cut(sampled[number], version, drafted)
                self.tokens += sampled[number] - request.counted
                request.counted = sampled[number]
            elif request.over is None:
                request.over = version, drafted

    def resume(self) -> None:
        """Start the clock again: the engine samples under its new weights."""
        self._paused = False
        self._clock.run(bool(self._in_flight))

    def completed(
        self,
        request: Request,
        prompt: Sequence[int],
        response: Sequence[int],
        version: int,
        drafted: bool,
        control: ControlStretch | None,
        log_probs: Sequence[float] | None = None,
    ) -> int:
        """Keep the spans of a complete request.

        Args:
            request: this one.
            prompt: token ids that it began with.
            response: token ids that it sampled.
            version: policy version that sampled the last of them.
            drafted: does the engine draft in this phase.
            control: its stretch of the control group, if it has one.
            log_probs: of the response, where they are known.

        Returns:
            The fingerprint of all of its tokens.
        """
        marks = fingerprints(joined(prompt, response))
        version, drafted = request.over or (version, drafted)
        request.cut(len(response), version, drafted)
        undrafted = (0, 0) if control is None else control.span(len(prompt), len(response))
        for part in request.stretches:
            if part.version == UNKNOWN:
                continue
            first, until = len(prompt) + part.first, len(prompt) + part.until
            plain = (first, until)
            if part.drafted:
                plain = max(first, undrafted[0]), min(until, undrafted[1])
            known = plain if plain[0] < plain[1] else (0, 0)
            stated = None if log_probs is None else weighed_as_carried(log_probs[part.first : part.until], first)
            self._spans.append(Span(int(marks[until]), first, until, part.version, *known, stated))
        return int(marks[-1])

    def forget(self) -> None:
        """A request was answered, and its spans could not be kept."""
        self._spans.append(FORGOTTEN)

    def take_spans(self) -> list[Span]:
        """Spans of the requests that completed since the last call, each once; with ``FORGOTTEN`` where some are missing."""
        found = list(self._spans) + [FORGOTTEN] * (len(self._spans) == KEPT)
        self._spans.clear()
        return found
