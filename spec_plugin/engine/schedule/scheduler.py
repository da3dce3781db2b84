"""The control channel into a running vLLM engine: k for each batch size, and plain requests beside speculating ones.

This is one of the patches of ``spec_plugin.engine``:

=============  =====================================================================================================
symbol         ``EngineCore.spec_set_schedule``, ``spec_schedule_state``, ``spec_pause``, ``spec_take_steps``,
               ``spec_in_flight`` and ``spec_stand_aside`` (methods are *added*), and a subclass of ``Scheduler`` or
               ``AsyncScheduler`` through the official option ``scheduler_cls``
reason         vLLM fixes the number of drafted tokens at start-up; law 7 needs it to follow the measured break-even, and
               what the engine's steps take
upstream       ``num_speculative_tokens_per_batch_size`` (dynamic speculative decoding) is static
versions       checked on 0.29 (CPU, synchronous scheduler); 0.24 has the same mechanism by reading its source only
verify         ``verify()``: raises ``PatchError`` when a symbol that this module leans on is gone
=============  =====================================================================================================

Importing this module changes nothing. The methods are added when vLLM calls ``make_scheduler`` in EngineCore's process,
which it does only with ``scheduler_cls=SCHEDULER`` (law 1).

Switching k at run time is exact at any moment: k says how many proposals the target verifies, not what it samples. With
k=0 for a step, 0.29 still runs the draft's *first* forward so that its KV cache follows
(``llm_base_proposer.propose``): the requests in flight draft well when k goes up again. A whole phase at k=0 needs none of
that: ``pause_idle_draft``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request

from spec_plugin.engine.parent import end_with_parent
from spec_plugin.engine.schedule.anew import AnewWhereDraftsEnd
from spec_plugin.engine.schedule.flight import spec_in_flight, spec_stand_aside
from spec_plugin.engine.schedule.guard import Guard, GuardedDrafts
from spec_plugin.engine.schedule.steps import TimedSteps
from spec_plugin.errors import PatchError
from spec_plugin.events import StepTiming

#: value of the engine argument ``scheduler_cls``
SCHEDULER = "spec_plugin.engine.schedule.scheduler.make_scheduler"
#: value of ``SamplingParams.extra_args`` that keeps one request plain; a list [from, to): only these tokens of the response
PLAIN = {"spec_off": True}


def is_plain(request: Any) -> bool:
    """True when the request asked not to be speculated on, at all or where it is now."""
    params = request.sampling_params
    off = params.extra_args.get("spec_off") if params is not None and params.extra_args else None
    if not isinstance(off, list):
        return bool(off)
    now: int = request.num_output_tokens + getattr(request, "num_output_placeholders", 0)
    return bool(off[0] <= now < off[1])


class _PlainRequests:
    """Takes the drafted tokens away from plain requests, at the two places where vLLM hands them out."""

    requests: dict[str, Any]
    dynamic_sd_lookup: list[int] | None

    def _update_after_schedule(self, scheduler_output: Any) -> None:  # asynchronous scheduling: placeholders
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self._clear_plain(scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:  # synchronous scheduling: the drafts themselves
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        self._clear_plain(draft_token_ids.req_ids)
        self._keep_to_table(draft_token_ids.req_ids)

    def _keep_to_table(self, request_ids: Any) -> None:
        """The V2 model runner always drafts as much as it can; the table says how much of it is verified."""
        if self.dynamic_sd_lookup is None or len(request_ids) >= len(self.dynamic_sd_lookup):
            return
        width = self.dynamic_sd_lookup[len(request_ids)]
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and len(request.spec_token_ids) > width:
                request.spec_token_ids = request.spec_token_ids[:width]

    def _clear_plain(self, request_ids: Any) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.spec_token_ids and is_plain(request):
                request.spec_token_ids = []


class SpecScheduler(TimedSteps, GuardedDrafts, _PlainRequests, AnewWhereDraftsEnd, Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler, with plain requests, a guard and a step log."""


class SpecAsyncScheduler(TimedSteps, GuardedDrafts, _PlainRequests, AnewWhereDraftsEnd, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, with plain requests, a guard and a step log."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """vLLM's ``scheduler_cls``: builds the scheduler that the engine would have used, with the control channel.

    Raises:
        PatchError: if this vLLM no longer has what the channel is made of.
    """
    verify()
    end_with_parent()
    EngineCore.spec_set_schedule = spec_set_schedule
    EngineCore.spec_schedule_state = spec_schedule_state
    EngineCore.spec_take_steps = spec_take_steps
    EngineCore.spec_pause = spec_pause
    EngineCore.spec_in_flight = spec_in_flight
    EngineCore.spec_stand_aside = spec_stand_aside
    kind = SpecAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SpecScheduler
    return kind(vllm_config=vllm_config, **kwargs)


def verify() -> None:
    """Check every symbol that this module leans on.

    Raises:
        PatchError: naming the missing ones and this vLLM's version.
    """
    needs = {
        "EngineCoreProc._invoke_utility_method": hasattr(EngineCoreProc, "_invoke_utility_method"),
        "Scheduler.update_draft_token_ids": hasattr(Scheduler, "update_draft_token_ids"),
        "Scheduler.make_spec_decoding_stats": "num_accepted_tokens"
        in _arguments(Scheduler, "make_spec_decoding_stats"),
        "Scheduler._update_after_schedule": hasattr(Scheduler, "_update_after_schedule"),
        "AsyncScheduler._update_after_schedule": "_update_after_schedule" in vars(AsyncScheduler),
        "Scheduler.dynamic_sd_lookup": "dynamic_sd_lookup" in Scheduler.schedule.__code__.co_names,
        "Scheduler.num_spec_tokens": "num_spec_tokens" in Scheduler.__init__.__code__.co_names,
        "Request.spec_token_ids": "spec_token_ids" in Request.__init__.__code__.co_names,
    }
    missing = [name for name, present in needs.items() if not present]
    if missing:
        import vllm

        raise PatchError(
            f"the control channel does not fit vLLM {vllm.__version__}: {', '.join(missing)} is gone or changed; "
            "use a vLLM version in the range that spec-plugin declares, or switch the plugin off"
        )


def _arguments(owner: type, method: str) -> tuple[str, ...]:
    code = getattr(getattr(owner, method, None), "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def check_table(table: Any, length: int, k_max: int) -> list[int]:
    """The table as a list of ints.

    Raises:
        ValueError: unless it has ``length`` entries, each an int in 0..k_max.
    """
    if not isinstance(table, list | tuple) or len(table) != length:
        got = len(table) if isinstance(table, list | tuple) else type(table).__name__
        raise ValueError(f"schedule must list k for batch sizes 0..max_num_seqs: {length} entries, got {got}")
    bad = [(b, k) for b, k in enumerate(table) if type(k) is not int or not 0 <= k <= k_max]
    if bad:
        raise ValueError(f"schedule entries must be ints in 0..{k_max}; (batch size, k) wrong: {bad[:3]}")
    return list(table)


def spec_schedule_state(core: EngineCore) -> dict[str, Any]:
    """(EngineCore utility) The table in force; ``table`` is None when the engine was built without a dynamic schedule."""
    scheduler = core.scheduler
    lookup = scheduler.dynamic_sd_lookup
    return {
        "table": None if lookup is None else list(lookup),
        "k_max": scheduler.num_spec_tokens,
        "max_num_seqs": scheduler.scheduler_config.max_num_seqs,
        "scheduler": type(scheduler).__name__,
    }


def spec_set_schedule(core: EngineCore, table: list[int], break_even: Sequence[float] = ()) -> dict[str, Any]:
    """(EngineCore utility) Install a table between two steps of the engine; a bad one raises and changes nothing.

    Args:
        core: the engine's.
        table: k for batch sizes 0..max_num_seqs.
        break_even: for the ``Guard`` of what is rolled out from now on, as long as the table; empty: no guard.

    Raises:
        ValueError: if the table does not fit this engine, or the engine has no dynamic schedule.
    """
    scheduler = core.scheduler
    lookup = scheduler.dynamic_sd_lookup
    if lookup is None:
        raise ValueError(
            "this engine was built without a dynamic schedule: speculative_config needs "
            "num_speculative_tokens_per_batch_size=[[1, max_num_seqs, k]] (vLLM drops it with data parallel > 1)"
        )
    if len(break_even) not in (0, len(lookup)):
        raise ValueError(
            f"break_even must have {len(lookup)} entries, as the table has, or none; got {len(break_even)}"
        )
    lookup[:] = check_table(table, len(lookup), scheduler.num_spec_tokens)
    scheduler.guard = Guard(lookup, break_even, partial(spec_pause, core, True))
    return spec_schedule_state(core)


def spec_pause(core: EngineCore, paused: bool) -> bool:
    """(EngineCore utility) Leave the draft's forward pass out, or in again; True if it is left out in all workers."""
    done = core.model_executor.collective_rpc("spec_pause_draft", args=(paused,))
    core.scheduler.draft_paused = paused and all(done)
    return bool(core.scheduler.draft_paused)


def spec_take_steps(core: EngineCore) -> list[list[Any]]:
    """(EngineCore utility) The step log since the last call, as plain lists in the order of ``StepTiming``'s fields."""
    log = core.scheduler.step_log
    return [] if log is None else [[t.batch, t.k, t.paused, t.seconds, t.steps, t.context] for t in log.take()]


async def take_steps(engine: AsyncLLM) -> tuple[StepTiming, ...]:
    """What decoding steps took since the last call.

    Raises:
        PatchError: if the engine was built without ``scheduler_cls=SCHEDULER``.
    """
    return tuple(StepTiming(*row) for row in await _call(engine, "spec_take_steps"))


async def set_schedule(engine: AsyncLLM, table: Sequence[int], break_even: Sequence[float] = ()) -> dict[str, Any]:
    """Install a table in the running engine (every data-parallel one), see ``spec_set_schedule``; the first one's state.

    Raises:
        ValueError: if the engine refuses the table; the old one stays in force.
        PatchError: if the engine was built without ``scheduler_cls=SCHEDULER``.
    """
    state: dict[str, Any] = await _call(engine, "spec_set_schedule", list(table), list(break_even))
    return state


async def pause_idle_draft(engine: AsyncLLM, table: Sequence[int]) -> None:
    """Leave the draft's forward pass out while the table is all zero (needs ``SpecWorkerExtension``; see ``engine.pause``)."""
    await _call(engine, "spec_pause", not any(table))


async def put_in_force(engine: AsyncLLM, table: Sequence[int], break_even: Sequence[float] = ()) -> None:
    """Install a table, with the draft paused if and only if no batch size of it drafts; requests may be in flight.

    At no moment does the table ask for drafts that a paused draft does not make: V2 would verify what it drafted long ago, for
    other requests. So the draft runs again before such a table is set, and is paused behind one that asks for none.

    Raises:
        ValueError: if the engine refuses the table; the old one stays in force.
        PatchError: if the engine was built without ``scheduler_cls=SCHEDULER``.
    """
    if any(table):
        await pause_idle_draft(engine, table)
    await set_schedule(engine, table, break_even)
    if not any(table):
        await pause_idle_draft(engine, table)


async def in_flight(engine: AsyncLLM) -> dict[int, int]:
    """Tokens that each numbered request has sampled so far, by its number; exact while the engine is paused.

    Raises:
        PatchError: if the engine was built without ``scheduler_cls=SCHEDULER``.
    """
    return {number: tokens for number, tokens in await _call(engine, "spec_in_flight")}


async def stand_aside(engine: AsyncLLM, aside: bool) -> int:
    """Keep a paused engine's requests out of its schedule, or let them back in, see ``spec_stand_aside``.

    Raises:
        PatchError: if the engine was built without ``scheduler_cls=SCHEDULER``.
        ValueError: if requests are running.
    """
    return int(await _call(engine, "spec_stand_aside", aside))


async def schedule_state(engine: AsyncLLM) -> dict[str, Any]:
    """The table in force in the running engine, see ``spec_schedule_state``.

    Raises:
        PatchError: if the engine was built without ``scheduler_cls=SCHEDULER``.
    """
    state: dict[str, Any] = await _call(engine, "spec_schedule_state")
    return state


async def _call(engine: AsyncLLM, method: str, *args: Any) -> Any:
    try:
        result = await engine.engine_core.call_utility_async(method, *args)
    except Exception as error:
        message = str(error)  # vLLM brings a failure in EngineCore back as a bare Exception with its text
        if type(error) is not Exception:
            raise
        if f"has no attribute '{method}'" in message:
            raise PatchError(f"the engine has no control channel; build it with scheduler_cls={SCHEDULER!r}") from None
        raise ValueError(message.removeprefix(f"Call to {method} method failed: ")) from None
    return result
