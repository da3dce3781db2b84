"""What vLLM's CPU build needs before speculative sampling is right and weights can change in a running engine."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_plugin.engine.vllm.repairs import patches
from spec_plugin.engine.vllm.repairs.patches import Guard, Patch
from spec_plugin_cpu.repairs.convolutions import CONVOLUTIONS
from spec_plugin_cpu.repairs.drafts_0_24 import DRAFTS_0_24
from spec_plugin_cpu.repairs.norms import NORMS
from spec_plugin_cpu.repairs.proposals import PROPOSALS


def expand(
    output: Tensor,  # [num_tokens] float32, int32 or int64; written here
    input_val: Tensor,  # [batch], one value a request
    cu_num_tokens: Tensor,  # [batch], running total of tokens
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value once for each of its tokens, ``replace_from`` becoming ``replace_to``."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(values, counts, output_size=output.shape[0]))


def expand_is_wrong(function: Callable[..., Any]) -> bool:
    """True if ``function`` does not expand as the rejection sampler needs, in any dtype that it passes."""
    cumulative = torch.tensor([3, 3, 5], dtype=torch.int32)  # the second request has no drafted token
    for dtype, values, want in (
        (torch.float32, [0.7, 9.0, 0.0], [0.7, 0.7, 0.7, 1.0, 1.0]),
        (torch.int32, [5, 9, 0], [5, 5, 5, 1, 1]),
        (torch.int64, [5, 9, 0], [5, 5, 5, 1, 1]),
    ):
        output = torch.full((5,), 77, dtype=dtype)
        function(output, torch.tensor(values, dtype=dtype), cumulative, 0, 1, MAX_NUM_TOKENS=128)
        if not torch.equal(output, torch.tensor(want, dtype=dtype)):
            return True
    return False


def live_gemm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Linear layers that keep their Parameter beside the packed copy, at the price of the memory for both.

    The packed copy is what makes decoding fast, and is made again when the layer is dispatched again: vLLM's
    ``process_weights_after_loading`` does that (verl calls it after each weight sync), and so does :func:`repack`. Until
    then, from the moment that a new weight is loaded, the layer computes with the Parameter itself: a trainer that only
    calls ``load_weights`` gets slower layers, never old weights.
    """

    def dispatch_cpu_unquantized_gemm(layer: nn.Module, remove_weight: bool) -> None:
        original(layer, False)
        if hasattr(layer, "cpu_linear"):
            _unpack_on_load(layer)

    return dispatch_cpu_unquantized_gemm


def _unpack_on_load(layer: Any) -> None:
    """Let the loader of the layer's weight switch every layer that uses this weight to the Parameter itself."""
    weight = layer.weight
    if weight.is_meta:
        return
    if not hasattr(weight, "spec_layers"):
        weight.spec_layers = []
        place = "_weight_loader" if hasattr(weight, "_weight_loader") else "weight_loader"
        load = getattr(weight, place, None) or _default_loader()

        @functools.wraps(load)
        def loader(*args: Any, **kwargs: Any) -> Any:
            for user in weight.spec_layers:
                user.cpu_linear = _plain_linear
            return load(*args, **kwargs)

        setattr(weight, place, loader)
    if all(user is not layer for user in weight.spec_layers):
        weight.spec_layers.append(layer)  # a tied weight has several


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))  # one packing keeps the bias in float32


def _default_loader() -> Callable[..., Any]:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return default_weight_loader  # type: ignore[no-any-return]


def repack(model: nn.Module) -> None:
    """Make every linear layer compute with its Parameter as it is now; does nothing where nothing is packed."""
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    if packed:
        utils = importlib.import_module("vllm.model_executor.layers.utils")
        for layer in packed:
            utils.dispatch_cpu_unquantized_gemm(layer, False)


def weights_are_dead(function: Callable[..., Any]) -> bool:
    """True if a linear layer prepared by ``function`` loses its weight, or does not follow a later load of it."""
    for dtype in (torch.float32, torch.bfloat16):
        layer: Any = nn.Linear(32, 32, bias=True, dtype=dtype).requires_grad_(False)
        nn.init.ones_(layer.weight)
        nn.init.ones_(layer.bias)
        layer.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
        function(layer, True)
        if layer.weight.numel() == 0:
            return True
        for value in (2.0, 3.0):
            layer.weight.weight_loader(layer.weight, torch.full((32, 32), value))
            for prepared_again in (False, True):
                if prepared_again:
                    function(layer, True)
                got = layer.cpu_linear(torch.ones(1, 32, dtype=dtype), layer.weight, layer.bias)
                if not torch.equal(got, torch.full_like(got, 32 * value + 1)):
                    return True
    return False


def indices_must_be_dense(function: Callable[..., Any]) -> bool:
    """True if the update of gated delta nets refuses a column of a table as the indices of its states."""
    if not hasattr(torch.ops._C, "fused_sigmoid_gating_delta_rule_update_cpu"):
        return False  # of this processor vLLM's build has no such kernel, and runs no such target
    one = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16)
    gates, table = torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int32)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32), "use_qk_l2norm_in_kernel": True}
    named = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1, dtype=torch.bfloat16), "q": one, "k": one, "v": one}
    state = torch.zeros(1, 1, 128, 128)
    try:
        function(**named, a=gates, b=gates, initial_state_source=state, initial_state_indices=table[:, 0], **options)
    except RuntimeError as error:
        if "contiguous" not in str(error):
            raise
        return True
    return False


def with_dense_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, called with a copy of the indices: of one request ``contiguous`` would return the column itself."""

    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> Any:
        indices = kwargs.get("initial_state_indices")
        if indices is not None:
            kwargs["initial_state_indices"] = indices.clone(memory_format=torch.contiguous_format)
        return original(*args, **kwargs)

    return update


CPU_PATCHES = (
    Patch(
        name="expand_kernel",
        symbol="vllm.utils.cpu_triton_utils:expand_kernel.func",  # the wrapper that the runner copies into the sampler
        moved_to=("vllm.v1.sample.rejection_sampler:expand_kernel._impl",),  # 0.32: registered before a worker is made
        reason="the expanded temperature, top_p and top_k of speculating requests were never written: logits were divided "
        "by uninitialised memory, log-probs were NaN and the samples were not the target's",
        upstream="vllm issue 55005, PR 55006",
        versions="0.24–0.32, run on 0.29.0, probed on 0.32.0, sources read of 0.24.0",
        needed=expand_is_wrong,
        replacement=lambda original: expand,
        guard=Guard(
            parameters=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS"),
            landmarks=("torch.ops._C.expand_kernel_impl(", "_ensure_int64(output)"),
        ),
    ),
    Patch(
        name="live_weights",
        symbol="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        reason="linear layers were packed once at load and their Parameter dropped: no later weight update could reach them",
        upstream="by design upstream, no issue",
        versions="0.24–0.32, run on 0.29.0, probed on 0.32.0, sources read of 0.24.0",
        needed=weights_are_dead,
        replacement=live_gemm,
        guard=Guard(
            parameters=("layer", "remove_weight"),
            landmarks=("layer.cpu_linear = ", "if remove_weight:", "layer.weight.ndim != 2"),
        ),
    ),
    Patch(
        name="dense_state_indices",
        symbol="vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_cpu",
        reason="an engine with a gated delta net and drafts died of the first step that drafted nothing: its kernel takes no "
        "column of the table of states",
        upstream="no issue that we know",
        versions="0.29.0",
        optional=True,
        needed=indices_must_be_dense,
        replacement=with_dense_indices,
        guard=Guard(
            parameters=(
                "A_log",
                "dt_bias",
                "q",
                "k",
                "v",
                "a",
                "b",
                "initial_state_source",
                "initial_state_indices",
                "cu_seqlens",
                "use_qk_l2norm_in_kernel",
                "softplus_beta",
                "softplus_threshold",
            ),
            landmarks=("torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu(",),
        ),
    ),
    *NORMS,
    *CONVOLUTIONS,
    *DRAFTS_0_24,
    *PROPOSALS,
)


def apply_live_weights() -> None:
    """Apply the patch that a weight sync needs, and no other: for a run without the plugin, to compare with.

    Raises:
        PatchError: if the patch no longer fits the installed vLLM.
    """
    patches.apply(next(patch for patch in CPU_PATCHES if patch.name == "live_weights"))


def register_kernels() -> None:
    """Put vLLM's CPU kernels in the place of Triton's, as vLLM does before it makes a worker (0.32; runners did it before)."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform

    if hasattr(Platform, "register_triton_kernel_overrides"):  # the object answers unknown names with None
        current_platform.register_triton_kernel_overrides()
