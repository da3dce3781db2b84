"""The control channel, from the process that owns the engine's front end: calls of what ``utilities`` adds to ``EngineCore``.

Every data-parallel engine is reached, and the first one's answer returned. Each raises ``PatchError`` if the engine was built
without ``scheduler_cls=SCHEDULER``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from spec_plugin.api.errors import PatchError
from spec_plugin.api.events import EngineSchedule, Schedule, StepPair, StepTiming
from spec_plugin.engine.protocol import Engine
from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER


async def take_steps(engine: Engine) -> tuple[StepTiming, ...]:
    """The engine's steps by kind and batch size, since the last call."""
    return tuple(StepTiming(*row) for row in await _call(engine, "spec_take_steps"))


class RestOfSteps(NamedTuple):
    """Of the step log what ``take_steps`` leaves out."""

    busy_seconds: float  # of all steps
    past_end_per_pos: tuple[int, ...]
    prompt_tokens: int
    recomputed_tokens: int

    @classmethod
    def of(cls, answer: Sequence[Any]) -> RestOfSteps:
        """From what ``spec_rest_of_steps`` returns."""
        busy, past_end, (prompt_tokens, recomputed_tokens) = answer
        return cls(busy, tuple(past_end), prompt_tokens, recomputed_tokens)


async def rest_of_steps(engine: Engine) -> RestOfSteps:
    """The rest of the log as ``take_steps`` last took it."""
    return RestOfSteps.of(await _call(engine, "spec_rest_of_steps"))


async def take_pairs(engine: Engine) -> tuple[StepPair, ...]:
    """Plain steps timed beside drafted ones, since the last call."""
    return tuple(StepPair(*row) for row in await _call(engine, "spec_take_pairs"))


async def set_schedule(
    engine: Engine, table: Sequence[int], break_even: Sequence[float] = (), plain_share: float = 0.0
) -> dict[str, Any]:
    """Install a table in the running engine, see ``spec_set_schedule``; what is then in force.

    Raises:
        ValueError: if the engine refuses the table; the old one stays in force.
    """
    state: dict[str, Any] = await _call(engine, "spec_set_schedule", list(table), list(break_even), plain_share)
    return state


async def pause_idle_draft(engine: Engine, paused: bool) -> None:
    """Leave the draft's forward pass out, or in again (needs ``SpecWorkerExtension``; see ``pause``)."""
    await _call(engine, "spec_pause", paused)


async def put_in_force(engine: Engine, schedule: Schedule) -> EngineSchedule:
    """Install a table, with the draft paused if and only if no batch size of it drafts; requests may be in flight.

    At no moment does the table ask for drafts that a paused draft does not make: V2 would verify what it drafted long ago, for
    other requests. So the draft runs again before such a table is set, and is paused behind one that asks for none.

    Raises:
        ValueError: if the engine refuses the table; the old one stays in force.
    """
    table = schedule.table
    if any(table):
        await pause_idle_draft(engine, False)
    state = await set_schedule(engine, table, schedule.break_even, schedule.plain_share)
    if not any(table):
        await pause_idle_draft(engine, True)
    return EngineSchedule(replace(schedule, table=tuple(state["table"])))


async def in_flight(engine: Engine) -> dict[int, int]:
    """Tokens that each numbered request has sampled so far, by its number; exact while the engine is paused."""
    return {number: tokens for number, tokens in await _call(engine, "spec_in_flight")}


async def stand_aside(engine: Engine, aside: bool) -> int:
    """Keep a paused engine's requests out of its schedule, or let them back in, see ``spec_stand_aside``.

    Raises:
        ValueError: if requests are running.
    """
    return int(await _call(engine, "spec_stand_aside", aside))


async def schedule_state(engine: Engine) -> dict[str, Any]:
    """The table in force in the running engine, see ``spec_schedule_state``."""
    state: dict[str, Any] = await _call(engine, "spec_schedule_state")
    return state


async def _call(engine: Engine, method: str, *args: Any) -> Any:
    try:
        result = await engine.engine_core.call_utility_async(method, *args)
    except Exception as error:
        message = str(error)  # vLLM brings a failure in EngineCore back as a bare Exception with its text
        if type(error) is not Exception:
            raise
        if f"has no attribute '{method}'" in message:
            raise PatchError(
                f"this engine was built without spec-plugin's scheduler, so k cannot be set: pass vLLM the arguments of "
                f"EngineFront.engine_arguments, scheduler_cls={SCHEDULER!r} among them"
            ) from None
        raise ValueError(message.removeprefix(f"Call to {method} method failed: ")) from None
    return result
