"""Utilities of ``EngineCore``: what the engine's front end asks of the scheduler between two steps, through ``channel``.

vLLM looks a utility up by its name on ``EngineCore``, so each is added to that class, under its own name (``UTILITIES``), and
only by ``add_utilities``, which ``scheduler.make_scheduler`` calls in EngineCore's process.

Two of them are for an engine that was paused with ``mode="keep"``: nothing is scheduled, and what was in flight waits, without
a place in the KV cache, to go on under the next weights. They lean on ``Scheduler.requests``, ``running``, ``waiting``,
``skipped_waiting`` and ``policy``, checked on vLLM 0.29.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine.core import EngineCore

from spec_plugin.engine.vllm.schedule.cutoff import DraftCutoff
from spec_plugin.engine.vllm.schedule.pause import pause_in_workers

#: key in ``SamplingParams.extra_args`` of the number by which the engine's front end knows a request
NUMBER = "spec_number"


def spec_schedule_state(core: EngineCore) -> dict[str, Any]:
    """(EngineCore utility) The table in force; ``table`` is None when the engine was built without a dynamic schedule."""
    scheduler: Any = core.scheduler
    lookup = scheduler.dynamic_sd_lookup
    return {"table": None if lookup is None else list(lookup)}


def spec_set_schedule(
    core: EngineCore, table: list[int], break_even: Sequence[float] = (), plain_share: float = 0.0
) -> dict[str, Any]:
    """(EngineCore utility) Install a table between two steps of the engine; a bad one raises and changes nothing.

    Args:
        core: of this process.
        table: k for batch sizes 0..max_num_seqs.
        break_even: for the ``DraftCutoff`` of what is rolled out from now on, as long as the table; empty: none.
        plain_share: for the ``PairedSteps``, see ``Schedule``.

    Raises:
        ValueError: if the table does not fit this engine, or the engine has no dynamic schedule.
    """
    scheduler: Any = core.scheduler
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
    scheduler.spec_cutoff, scheduler.spec_executor = DraftCutoff(lookup, break_even), core.model_executor
    scheduler.spec_pairs.follow(plain_share)
    return spec_schedule_state(core)


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


def spec_pause(core: EngineCore, paused: bool) -> bool:
    """(EngineCore utility) Leave the draft's forward pass out, or in again; True if it is left out in all workers."""
    scheduler: Any = core.scheduler
    scheduler.spec_paused = pause_in_workers(core.model_executor, paused)
    return bool(scheduler.spec_paused)


def spec_take_steps(core: EngineCore) -> list[list[Any]]:
    """(EngineCore utility) The step log since the last call, as plain lists in the order of ``StepTiming``'s fields."""
    scheduler: Any = core.scheduler
    return [list(vars(t).values()) for t in scheduler.spec_steps.take()]


def spec_rest_of_steps(core: EngineCore) -> tuple[float, list[int], list[int]]:
    """(EngineCore utility) Of the log as it was last taken: seconds of all steps, and what was accepted beyond responses' ends.

    The second as ``RolloutStats.past_end_per_pos``; at last ``RolloutStats.prompt_tokens`` and
    ``RolloutStats.recomputed_tokens``.
    """
    log = core.scheduler.spec_steps
    return log.busy_seconds, list(log.past_end), [log.prompt_tokens, log.recomputed_tokens]


def spec_take_pairs(core: EngineCore) -> list[list[Any]]:
    """(EngineCore utility) Pairs of steps since the last call, as plain lists in the order of ``StepPair``'s fields."""
    scheduler: Any = core.scheduler
    return [list(vars(p).values()) for p in scheduler.spec_pairs.take()]


def spec_in_flight(core: EngineCore) -> list[list[int]]:
    """(EngineCore utility) Number, and tokens sampled so far, of each request that has a number and is not complete."""
    found = []
    for request in core.scheduler.requests.values():
        params = request.sampling_params
        number = params.extra_args.get(NUMBER) if params is not None and params.extra_args else None
        if number is not None and not request.is_finished():
            found.append([number, request.num_output_tokens])
    return found


def spec_stand_aside(core: EngineCore, aside: bool) -> int:
    """(EngineCore utility) Take all requests in flight out of the scheduler's queues, or put them back before all others.

    Args:
        core: of this process.
        aside: True: stand aside; False: come back.

    Returns:
        The number of requests moved.

    Raises:
        RuntimeError: if requests are running, or others stand aside already.
    """
    scheduler: Any = core.scheduler
    if aside:
        if scheduler.spec_aside is not None:
            raise RuntimeError("requests stand aside already, and would be lost: let them back in first")
        if scheduler.running:
            raise RuntimeError(
                f"{len(scheduler.running)} requests are running: pause the engine with mode='keep' before they stand aside"
            )
        queues = scheduler.waiting, scheduler.skipped_waiting
        scheduler.spec_aside = queues
        scheduler.waiting, scheduler.skipped_waiting = (create_request_queue(scheduler.policy) for _ in queues)
        return sum(map(len, queues))
    back = dict(zip(("waiting", "skipped_waiting"), scheduler.spec_aside or (), strict=False))
    for name, queue in back.items():
        queue.remove_requests([request for request in queue if request.is_finished()])  # aborted meanwhile
        for request in getattr(scheduler, name):
            queue.add_request(request)
        setattr(scheduler, name, queue)
    scheduler.spec_aside = None
    return sum(map(len, back.values()))


#: all that is ever put on vLLM's ``EngineCore``
UTILITIES = (
    spec_set_schedule,
    spec_schedule_state,
    spec_take_steps,
    spec_rest_of_steps,
    spec_take_pairs,
    spec_pause,
    spec_in_flight,
    spec_stand_aside,
)


def add_utilities() -> None:
    """Put them on ``EngineCore``; in its own process, once it is known that the scheduler is ours."""
    for utility in UTILITIES:
        setattr(EngineCore, utility.__name__, utility)
