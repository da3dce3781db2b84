"""Our schedulers: vLLM's own, with k for each batch size set at run time, and plain requests beside speculating ones.

This is one of the patches of ``spec_plugin.engine``:

=============  =====================================================================================================
symbol         ``utilities.UTILITIES`` are *added* to ``EngineCore``, and a subclass of ``Scheduler`` or
               ``AsyncScheduler`` through the official option ``scheduler_cls``
reason         vLLM fixes the number of drafted tokens at start-up; law 7 needs it to follow the measured break-even, and
               what the engine's steps take
upstream       ``num_speculative_tokens_per_batch_size`` (dynamic speculative decoding) is static
versions       checked on 0.29 (CPU, synchronous scheduler); 0.24 has the same mechanism by reading its source only
verify         ``verify()``: raises ``PatchError`` when a symbol that this package leans on is gone
=============  =====================================================================================================

Importing this module changes nothing. The methods are added when vLLM calls ``make_scheduler`` in EngineCore's process,
which it does only with ``scheduler_cls=SCHEDULER`` (law 1).

Switching k at run time is exact at any moment: k says how many proposals the target verifies, not what it samples. With
k=0 for a step, 0.29 still runs the draft's *first* forward so that its KV cache follows
(``llm_base_proposer.propose``): the requests in flight draft well when k goes up again. A whole phase at k=0 needs none of
that: ``channel.pause_idle_draft``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.parent import end_with_parent
from spec_plugin.engine.vllm.schedule.mixin import SpecSchedulerMixin
from spec_plugin.engine.vllm.schedule.utilities import add_utilities

#: value of the engine argument ``scheduler_cls``
SCHEDULER = "spec_plugin.engine.vllm.schedule.scheduler.make_scheduler"


class SpecScheduler(SpecSchedulerMixin, Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler with ``SpecSchedulerMixin``."""


class SpecAsyncScheduler(SpecSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with ``SpecSchedulerMixin``."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """vLLM's ``scheduler_cls``: builds the scheduler that the engine would have used, with the control channel.

    Raises:
        PatchError: if this vLLM no longer has what the channel is made of.
    """
    verify()
    end_with_parent()
    add_utilities()
    kind = SpecAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SpecScheduler
    return kind(vllm_config=vllm_config, **kwargs)


def verify() -> None:
    """Check every symbol of vLLM that the schedulers and the utilities lean on.

    Raises:
        PatchError: naming the missing ones and this vLLM's version.
    """
    needs = {
        "EngineCoreProc._invoke_utility_method": hasattr(EngineCoreProc, "_invoke_utility_method"),
        "Scheduler.update_draft_token_ids": hasattr(Scheduler, "update_draft_token_ids"),
        "Scheduler.make_spec_decoding_stats": "num_accepted_tokens"
        in _arguments(Scheduler, "make_spec_decoding_stats"),
        "Scheduler._update_request_with_output": "new_token_ids"
        in _arguments(Scheduler, "_update_request_with_output"),
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
            f"spec-plugin's scheduler does not fit vLLM {vllm.__version__}: {', '.join(missing)} is gone or changed; "
            "install a vLLM of the range that spec-plugin declares, or switch the plugin off"
        )


def _arguments(owner: type, method: str) -> tuple[str, ...]:
    code = getattr(getattr(owner, method, None), "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]
