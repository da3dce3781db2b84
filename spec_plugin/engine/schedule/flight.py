"""What a paused engine can say of its requests in flight, and how it runs others meanwhile: two utilities of ``EngineCore``.

Both are for an engine that was paused with ``mode="keep"``: nothing is scheduled, and what was in flight waits, without a
place in the KV cache, to go on under the next weights. They lean on ``Scheduler.requests``, ``running``, ``waiting``,
``skipped_waiting`` and ``policy``, checked on vLLM 0.29; ``spec_plugin.engine.schedule.scheduler`` adds them to ``EngineCore``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine.core import EngineCore

#: key in ``SamplingParams.extra_args`` of the number by which the engine's front end knows a request
NUMBER = "spec_number"


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
    """(EngineCore utility) Let all requests in flight wait where nobody schedules them, or come back before any others.

    Args:
        core: the engine's.
        aside: stand aside, or come back.

    Returns:
        How many do.

    Raises:
        RuntimeError: if requests are running, or others stand aside already.
    """
    scheduler: Any = core.scheduler
    if aside:
        if getattr(scheduler, "spec_aside", None) is not None:
            raise RuntimeError("others stand aside already, and would be forgotten")
        if scheduler.running:
            raise RuntimeError("requests are running: pause the engine, and keep them, before they stand aside")
        queues = scheduler.waiting, scheduler.skipped_waiting
        scheduler.spec_aside = queues
        scheduler.waiting, scheduler.skipped_waiting = (create_request_queue(scheduler.policy) for _ in queues)
        return sum(map(len, queues))
    back = dict(zip(("waiting", "skipped_waiting"), getattr(scheduler, "spec_aside", None) or (), strict=False))
    for name, queue in back.items():
        queue.remove_requests([request for request in queue if request.is_finished()])  # aborted meanwhile
        for request in getattr(scheduler, name):
            queue.add_request(request)
        setattr(scheduler, name, queue)
    scheduler.spec_aside = None
    return sum(map(len, back.values()))
