"""The link: how the first actor rank reaches every engine of every replica, and how their answers become one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from spec_plugin.api.errors import stops_the_run
from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.rollouts import CHUNK_TOKENS, Rollout, chunks
from spec_plugin.api.spans import Span
from spec_plugin.step_cost.bands import together


@dataclass(frozen=True)
class OfEngine:
    """An argument that is another one for each engine."""

    values: Sequence[Any]


class EngineLink:
    """How the actor process reaches its engines: each call reaches all of them, and their answers become one.

    The engines have the methods of ``spec_plugin.engine.calls.SpecEngineMethods``.

    What a call raises, and an answer of another type, turns speculation off (law 6). So does one that does not come: each call
    is given up after three times ``spec.refresh_timeout_s``, if it lets the event loop run; ``self_test`` after more.
    """

    def __init__(self, engines: Sequence[Any], timeout_s: float) -> None:
        """Bind to engines that run, or will run.

        Args:
            engines: all of the run.
            timeout_s: for each call, unless it says otherwise.
        """
        self._engines, self.timeout_s = engines, timeout_s

    def engines(self) -> Sequence[Any]:
        """Handles of all engines of the run, in a fixed order; a link may find them only when first asked."""
        return self._engines

    def call(self, engine: Any, method: str, *args: Any) -> Awaitable[Any]:
        """Begin a call of a ``SpecEngineMethods`` method; ``call_all`` awaits the answer, and gives up after its time-out."""
        raise NotImplementedError

    def put(self, value: Any) -> Any:
        """A value that all engines get, packed once for all of them."""
        return value

    async def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every engine at once, and wait for all.

        Args:
            method: of ``SpecEngineMethods``.
            args: for it; an ``OfEngine`` has one for each.
            timeout_s: in the place of the link's own.

        Raises:
            BaseException: what an engine has raised; of several what must stop the run, else that of the first of them.
            TimeoutError: if one does not answer in time.
        """
        calls = [self.call(engine, method, *args_of(args, i)) for i, engine in enumerate(self.engines())]
        everything = asyncio.gather(*calls, return_exceptions=True)
        answers = await asyncio.wait_for(everything, timeout_s or self.timeout_s)
        if (error := chosen_error(answers)) is not None:
            raise error
        return answers

    async def install(self, refresh: DraftRefresh, force: bool) -> RefreshReport:
        """Every engine installs this draft, or all go back to the one that they served; ``force`` when its version is not newer.

        Raises:
            RuntimeError: if an engine could not go back.
        """
        several = len(self.engines()) > 1
        # a GPU's memory does not travel
        stored = self.put(replace(refresh, tensors={n: t.detach().cpu() for n, t in refresh.tensors.items()}))
        try:
            report = merge_refreshes(await self.call_all("spec_refresh", stored, force, several))
        except BaseException:
            if several:  # those that did install it go back, as well as they can
                with suppress(Exception):
                    await self.call_all("spec_settle", False)
            raise
        if several:  # each holds on to its previous draft until it is known what became of the others
            await self.call_all("spec_settle", report.installed)
        return report

    async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
        """Send the table of k to every engine; the answer is what all of them have confirmed."""
        return EngineSchedule.of_all(await self.call_all("spec_set_schedule", schedule))

    async def self_test(self, seconds: float, part: SelfTestPart) -> SelfTestReport:
        """Every engine is tested, all at once."""
        asked = seconds, len(self.engines()), part
        return merge_reports(await self.call_all("spec_self_test", *asked, timeout_s=4 * seconds + 300))

    async def start_phase(self, policy_version: int) -> None:
        """Begin a rollout phase with this policy version on every engine: counters and clocks restart."""
        await self.call_all("spec_start_phase", policy_version)

    async def stats(self, policy_version: int) -> RolloutStats:
        """Merged counters and step timings of the phase of this policy version."""
        return merge_stats(await self.call_all("spec_stats", policy_version))

    async def share_rollouts(self, most_tokens: int) -> list[Rollout]:
        """What the engines sampled, which then all of them know.

        Args:
            most_tokens: of all engines together; the rest nobody would keep, so it does not travel.
        """
        parts = await self._take_rollouts(most_tokens)
        if len(parts) > 1:
            own = OfEngine(range(len(parts)))
            for chunk in chunks(parts):
                await self.call_all("spec_remember", self.put(chunk), own)
        return [rollout for part in parts for rollout in part]

    async def _take_rollouts(self, most_tokens: int) -> list[list[Rollout]]:
        """Each engine's rollouts: all where there is room for all, else as many tokens of each engine as of any other."""
        parts: list[list[Rollout]] = [[] for _ in self.engines()]
        left, more, giving = most_tokens, False, len(parts)
        while left > 0 and giving:
            before = left
            answers = await self.call_all("spec_take_rollouts", min(CHUNK_TOKENS, -(-left // giving)), more)
            for part, answer in zip(parts, answers, strict=True):
                for rollout in answer:
                    if rollout.tokens <= left:
                        part.append(rollout)
                        left -= rollout.tokens
            giving, more = sum(map(bool, answers)) if left < before else 0, True
        return parts

    async def remember(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts to the memory that every engine drafts from."""
        for chunk in chunks([rollouts]):
            await self.call_all("spec_remember", self.put(chunk), None)

    async def spans(self) -> list[Span]:
        """What the engines sampled since the last call, stretch by stretch."""
        return [span for part in await self.call_all("spec_take_spans") for span in part]

    async def state(self, moment: str) -> EngineState:
        """Versions and digests in every engine's worker, at a named moment.

        Raises:
            RuntimeError: if the engines differ.
        """
        return merge_states(await self.call_all("spec_state", moment))


class ActorsLink(EngineLink):
    """Engines that are Ray actors: plain remote calls.

    The draft travels through Ray's object store, once for all engines, whatever carries the policy's weights.
    """

    def __init__(
        self, engines: Sequence[Any], timeout_s: float, put: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Bind to actors that run, or will run.

        Args:
            engines: their handles.
            timeout_s: for each call, unless it says otherwise.
            put: ``ray.put``; without it what all get is copied once for each.
        """
        super().__init__(engines, timeout_s)
        self._put = put

    def call(self, engine: Any, method: str, *args: Any) -> Awaitable[Any]:
        """Ray's object reference of the call, which can be awaited."""
        answer: Awaitable[Any] = getattr(engine, method).remote(*args)
        return answer

    def put(self, value: Any) -> Any:
        """What ``put`` made of it: with ``ray.put`` a reference into the object store."""
        return self._put(value)


class LocalLink(EngineLink):
    """Engines of this process: objects with ``SpecEngineMethods``, such as ``EngineCalls(front)``."""

    def __init__(self, engines: Sequence[Any], timeout_s: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Bind to engines that run, or will run.

        Args:
            engines: all of the run.
            timeout_s: for each call, unless it says otherwise.
            loop: the engines' own event loop, which runs in another thread; None: any will do.
        """
        super().__init__(engines, timeout_s)
        self.loop = loop

    def call(self, engine: Any, method: str, *args: Any) -> Awaitable[Any]:
        """The engine's own coroutine; on its event loop where that runs in another thread."""
        answer: Coroutine[Any, Any, Any] = getattr(engine, method)(*args)
        if self.loop is None:
            return answer
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self.loop))


def args_of(args: Sequence[Any], engine: int) -> list[Any]:
    """The arguments that this engine gets."""
    return [arg.values[engine] if isinstance(arg, OfEngine) else arg for arg in args]


def chosen_error(answers: Sequence[Any]) -> BaseException | None:
    """The error among some answers that must stop the run, else the first error; None where no engine has raised."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    return next((error for error in errors if stops_the_run(error)), errors[0] if errors else None)


def merge_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """Several engines' phases as one: counts add up, the slowest decides the time, steps of one kind are told as one."""
    return RolloutStats(
        policy_version=parts[0].policy_version,
        requests=sum(p.requests for p in parts),
        tokens=sum(p.tokens for p in parts),
        seconds=max(p.seconds for p in parts),
        drafts=sum(p.drafts for p in parts),
        draft_tokens=sum(p.draft_tokens for p in parts),
        accepted_tokens=sum(p.accepted_tokens for p in parts),
        accepted_per_pos=_sum_positions([p.accepted_per_pos for p in parts]),
        steps=together([s for p in parts for s in p.steps]),
        past_end_per_pos=_sum_positions([p.past_end_per_pos for p in parts]),
        prompt_tokens=sum(p.prompt_tokens for p in parts),
        recomputed_tokens=sum(p.recomputed_tokens for p in parts),
        pairs=tuple(pair for p in parts for pair in p.pairs),
        shadow_rounds=sum(p.shadow_rounds for p in parts),
        shadow_per_pos=_sum_positions([p.shadow_per_pos for p in parts]),
        interrupted=any(p.interrupted for p in parts),
        busy_seconds=max(p.busy_seconds for p in parts),
        parts=tuple(parts) if len(parts) > 1 else (),
    )


def _sum_positions(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*parts, fillvalue=0))


def merge_reports(parts: Sequence[SelfTestReport]) -> SelfTestReport:
    """Several engines' self-tests as one: every check of every engine counts."""
    if len(parts) == 1:
        return parts[0]
    checks = [replace(c, name=f"engine {i} {c.name}") for i, p in enumerate(parts) for c in p.checks]
    return SelfTestReport(tuple(checks), max(p.seconds for p in parts), tuple(s for p in parts for s in p.steps))


def merge_refreshes(parts: Sequence[RefreshReport]) -> RefreshReport:
    """Several engines' refreshes as one: installed only if every engine installed it."""
    refused = next((p for p in parts if not p.installed), parts[0])
    reasons = [f"engine {i}: {p.reason}" if len(parts) > 1 else p.reason for i, p in enumerate(parts) if p.reason]
    return replace(refused, installed=all(p.installed for p in parts), reason="; ".join(reasons))


def merge_states(parts: Sequence[EngineState]) -> EngineState:
    """Several engines' states as one.

    Raises:
        RuntimeError: if they differ.
    """
    held = [replace(p, admitted=0) for p in parts]
    if any(p != held[0] for p in held):
        raise RuntimeError(f"the engines differ in the weights or versions that they hold: {parts}")
    return replace(held[0], admitted=sum(p.admitted for p in parts))
