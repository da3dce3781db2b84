"""Which of vLLM's model runners serves these tests: V1, or V2 by ``SPEC_PLUGIN_CPU_RUNNER``; every engine that starts is asked.

Import it before vLLM. With V2 on a CPU its kernels run in Triton's interpreter (``spec_plugin_cpu.v2_runner``).
"""

from __future__ import annotations

from typing import Any

import spec_plugin_cpu.v2_runner.in_force  # noqa: F401
from spec_plugin_cpu.v2_runner import IN_FORCE, SWITCH, V2_ASYNC, chosen

__all__ = ["FIRST", "IN_FLIGHT", "MODULE", "SWITCH", "V2", "assert_serves"]
#: imported before anything else by the interpreters that engines are forked from
FIRST = IN_FORCE
V2 = bool(chosen())
#: steps that are under way when the scheduler makes the next one
IN_FLIGHT = 2 if chosen() == V2_ASYNC else 1
MODULE = "vllm.v1.worker.cpu.model_runner" if V2 else "vllm.v1.worker.cpu_model_runner"


def assert_serves(info: dict[str, Any], vllm_config: Any) -> None:
    """An engine has the runner and the scheduling that were chosen, and not what vLLM fell back to.

    Args:
        info: its worker's ``inspected.Inspected.spec_draft_info``.
        vllm_config: its own.
    """
    assert info["runner"].rpartition(".")[0] == MODULE, info["runner"]
    wanted = chosen() == V2_ASYNC
    # an engine whose target keeps states is started without it, as the plugin does
    assert vllm_config.scheduler_config.async_scheduling == (wanted and not vllm_config.model_config.is_hybrid)
