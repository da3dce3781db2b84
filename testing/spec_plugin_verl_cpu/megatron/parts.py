"""Parts of Megatron and mbridge that want Transformer Engine or Apex; the package's docstring lists each with its reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from spec_plugin_cpu.shims import Shims

from spec_plugin_verl_cpu.megatron.attention import CpuAttention
from spec_plugin_verl_cpu.megatron.experts import CpuExperts

_ADVICE = "install the pins of tools/requirements-megatron.txt, or report this"
_shims = Shims("spec_plugin_verl_cpu.megatron", _ADVICE)

#: of the local layers -> what mbridge calls them, after Transformer Engine's fused ones
_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def install() -> None:
    """Replace them, in this process, once.

    Raises:
        PatchError: if a symbol is gone or no longer looks as expected.
    """
    random = "megatron.core.tensor_parallel.random"
    _shims.replace(
        random, "_get_cuda_rng_state", lambda _: lambda *_a, **_k: torch.get_rng_state(), ("device", "clone")
    )
    _shims.replace(
        random, "_set_cuda_rng_state", lambda _: lambda state, *_a, **_k: torch.set_rng_state(state), ("new_state",)
    )
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _shims.replace(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        lambda _: (
            lambda tensor, as_numpy=False, record_stream=False: (
                tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
            )
        ),
        ("tensor", "as_numpy", "record_stream"),
    )
    _shims.replace(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        _norms_under_sequence_parallelism,
        ("cls", "config", "hidden_size", "eps"),
        ("assert not config.sequence_parallel", "norm_cls(normalized_shape=hidden_size, eps=eps)"),
    )
    _shims.replace(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.state_dict",
        _state_before_the_first_step,
        ("self",),
        ("if not HAVE_APEX_OR_TE:", "assert len(steps) == 1"),
    )
    _shims.replace(
        "mbridge.core.llm_bridge",
        "get_gpt_decoder_block_spec",
        _local_layers,
        ("config", "use_transformer_engine"),
    )
    _shims.replace(
        "mbridge.core.bridge",
        "Bridge._weight_name_mapping_mcore_to_hf",
        _names_of_local_layers,
        ("self", "mcore_weights_name"),
        ("_weight_name_mapping_attention", "_weight_name_mapping_mlp", "_weight_name_mapping_other"),
    )


def _norms_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: type, config: Any, *args: Any, persist_layer_norm: bool = False, **kwargs: Any) -> Any:
        parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = parallel
        return norm

    return new


def _state_before_the_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        for parameter in (p for group in adam.param_groups for p in group["params"] if not adam.state[p]):
            moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return original(self)

    return state_dict


def _local_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    taken = inspect.signature(original).parameters

    def block(config: Any, use_transformer_engine: bool = True, **more: Any) -> Any:
        spec = original(config, use_transformer_engine=False, **{n: v for n, v in more.items() if n in taken})
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CpuAttention
            if layer.submodules.mlp.module is MoELayer:
                layer.submodules.mlp.submodules.experts = ModuleSpec(module=CpuExperts)
        return spec

    block.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # mbridge looks what it takes
    return block


def _names_of_local_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    def names(self: Any, mcore_weights_name: str) -> Any:
        try:
            return original(self, mcore_weights_name)
        except NotImplementedError:  # a norm, which in front of experts has the same name in both
            for local, fused in _NAMES.items():
                if mcore_weights_name.endswith(f".{local}"):
                    return original(self, mcore_weights_name.removesuffix(local) + fused)
            raise

    return names
