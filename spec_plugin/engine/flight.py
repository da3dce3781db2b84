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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spec_plugin.api.events import UNKNOWN
from spec_plugin.api.spans import FORGOTTEN, KEPT, KEPT_LOG_PROBS, Span, fingerprints, joined, weighed_as_carried
from spec_plugin.engine.control_group import ControlStretch
from spec_plugin.engine.vllm.requests import stated_log_probs
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
    """One request, inside ``EngineFront.sample``: the adapter passes ``extra_args`` on and calls ``completed``."""

    number: int
    version: int  # policy version that samples now
    control: ControlStretch | None = (
        None  # the stretch that it samples without drafts, if it is one of the control group
    )
    #: for vLLM's ``SamplingParams.extra_args``, the trainer's own among them; without them the engine cannot match the request
    extra_args: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    counted: int = 0  # of them in phases before this one
    lost: bool = False  # the core did not say how many tokens it had at the last weight sync
    over: tuple[int, bool] | None = (
        None  # it was complete at a weight sync already: version until then, and did it draft
    )
    stretches: list[Stretch] = field(default_factory=list)
    response: Sequence[int] | None = None  # token ids; None: it was not answered
    sampled_by: int | None = None  # policy version that sampled all of it, where the adapter knows
    log_probs: Sequence[float] | None = None  # of the response
    asked: bool = True  # did the trainer ask for them

    def completed(
        self,
        response: Sequence[int],
        version: int | None = None,
        log_probs: Sequence[float] | None = None,
        asked: bool = True,
    ) -> None:
        """Record the engine's answer; call it before the block ends.

        Args:
            response: token ids that were sampled, without the prompt's.
            version: policy version that sampled all of them, where the trainer cuts requests short at a weight sync and so
                knows it. None: that of the phase, or those of the phases, in which the request ran.
            log_probs: of the response, where the trainer does not learn which version sampled it: they distinguish
                requests of the same text.
            asked: has the trainer asked for them; if not, they are kept in the request's span, to verify what they can.
        """
        self.response, self.sampled_by, self.log_probs, self.asked = response, version, log_probs, asked
        self.tokens = len(response)

    def answered(self, answer: Any, asked: bool = True) -> None:
        """Record vLLM's ``CompletionOutput``, with the log-prob of each sampled token where it has them."""
        self.completed(answer.token_ids, log_probs=stated_log_probs(answer) or None, asked=asked)

    def cut(self, tokens: int, version: int, drafted: bool) -> None:
        """End a stretch at ``tokens`` (sampled so far in all): those since the last cut are of ``version``."""
        first = self.stretches[-1].until if self.stretches else 0
        if tokens > first:
            known = not self.lost and version == self.version
            self.stretches.append(Stretch(first, tokens, version if known else UNKNOWN, drafted))
        self.lost = False


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
        self._log_probs: deque[tuple[Span, bytes]] = deque(maxlen=KEPT_LOG_PROBS)  # that the trainer did not ask for
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
                if request.over is None:  # one that was complete before the weight sync keeps its version
                    request.version = version

    @contextmanager
    def request(self, version: int) -> Iterator[Request]:
        """Count and time one request, whose first token ``version`` samples."""
        number = next(self._numbers)
        request = Request(number, version, extra_args={NUMBER: number})
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

    def completed(self, request: Request, prompt: Sequence[int], version: int, drafted: bool) -> None:
        """Keep the spans of a complete request.

        Args:
            request: with its response.
            prompt: token ids that it began with.
            version: policy version of this phase, which sampled the last of its tokens unless the request knows better.
            drafted: does the engine draft in this phase.
        """
        assert request.response is not None
        if request.sampled_by is not None:  # all of it, whatever came in between
            request.version = version = request.sampled_by
            request.stretches, request.lost, request.over = [], False, None
        size, length = len(prompt), len(request.response)
        marks = fingerprints(joined(prompt, request.response))
        request.cut(length, *(request.over or (version, drafted)))
        undrafted = (0, 0) if request.control is None else request.control.span(size, length)
        for part in request.stretches:
            if part.version == UNKNOWN:
                continue
            first, until = size + part.first, size + part.until
            plain = (max(first, undrafted[0]), min(until, undrafted[1])) if part.drafted else (first, until)
            known = plain if plain[0] < plain[1] else (0, 0)
            log_probs = None if request.log_probs is None else request.log_probs[part.first : part.until]
            stated = None if log_probs is None else weighed_as_carried(log_probs, first)
            span = Span(int(marks[until]), first, until, part.version, *known, stated)
            self._spans.append(span)
            if log_probs is not None and not request.asked:
                self._log_probs.append((span, np.asarray(log_probs, np.float64).tobytes()))

    def forget(self) -> None:
        """A request was answered, and its spans could not be kept."""
        self._spans.append(FORGOTTEN)

    def take_spans(self) -> list[Span]:
        """Spans of the requests that completed since the last call, each once; with ``FORGOTTEN`` where some are missing."""
        log_probs = dict(self._log_probs)
        found = [replace(span, log_probs=log_probs[span]) if span in log_probs else span for span in self._spans]
        found += [FORGOTTEN] * (len(self._spans) == KEPT)
        self._spans.clear()
        self._log_probs.clear()
        return found
