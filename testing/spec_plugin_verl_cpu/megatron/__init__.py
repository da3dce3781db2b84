"""Runs verl's Megatron actors on a machine without any accelerator: for the kit, the tests and a laptop.

Chosen with ``VERL_USE_EXTERNAL_MODULES=spec_plugin_verl_cpu,spec_plugin_verl_cpu.megatron``, and inert without. Everything
else of Megatron is its own: pipeline schedules, tensor, sequence and context parallel collectives, distributed optimizer,
mbridge's export. Checked on megatron-core 0.16.1, mbridge 0.15.1 and verl 0.9.1; each replacement
(:class:`spec_plugin_cpu.shims.Shims`) refuses to be made where its symbol is no longer what it was.

======================================================== ================================================================
symbol                                                   reason
======================================================== ================================================================
``torch.cuda``: current_device, streams, random state,   Megatron calls them without asking whether there is a card;
synchronize, memory counters (``cuda.py``)               in an actor's process, from its first engine on
device "cuda" in torch's functions (``cuda.py``)         Megatron names the device in words: inside of the engine's own
                                                         methods, in their thread, "cuda" means the CPU
``megatron…random._get_cuda_rng_state`` and ``_set…``    random states of a card: those of the CPU
``megatron…torch_norm.WrappedTorchNorm.__new__``         without Apex and Transformer Engine norms are torch's, which are
                                                         refused under sequence parallelism: pointwise in tokens, they
                                                         need their gradients marked for the sum, and nothing else
``megatron…DotProductAttention`` (``attention.py``)      it knows neither packed sequences nor context parallelism
``megatron…token_dispatcher.maybe_move_tensor_to_cpu``   leaves what is on the CPU as it is, also where numbers are
                                                         asked for: the sizes of an all-to-all
``megatron…moe_utils.te_general_gemm``                   the router asks whether it is None, and without Transformer
                                                         Engine the name is not there: None
``megatron…DistributedOptimizer.state_dict``              a resumed run asks it for the step of an optimizer that has not
                                                         stepped; Apex's and Transformer Engine's know it, torch's does
                                                         not: it is 0
``mbridge…llm_bridge.get_gpt_decoder_block_spec``        Transformer Engine's layers: Megatron's own local ones, with
                                                         experts of ours (``experts.py``): mbridge knows the names of
                                                         grouped ones only, whose kernels are a card's
``mbridge…Bridge._weight_name_mapping_mcore_to_hf``      these have norms of their own, with names of their own
verl's ``McoreEngineConfig.dtype``                       it knows half precisions only, which are slow on CPUs: float32.
                                                         The optimizer then has no copies of the parameters, and what it
                                                         resumes is written into them: without gradients
======================================================== ================================================================
"""

from __future__ import annotations

from spec_plugin_verl_cpu import chosen

if chosen():
    from spec_plugin_verl_cpu import platform

    if hasattr(
        platform, "PlatformCPU"
    ):  # else it is being imported, verl for it, and this for verl: it ends by register()
        from spec_plugin_verl_cpu.megatron.engine import register

        register()
