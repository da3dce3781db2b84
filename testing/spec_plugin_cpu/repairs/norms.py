"""vLLM's root mean square norm on a CPU, where the layers of a draft are stacked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch


def takes_the_first_weight(function: Callable[..., Any]) -> bool:
    """True if ``function`` norms every layer of a stack with the first one's weight."""
    x, weights = torch.ones(2, 3, 16), torch.ones(2, 16)
    weights[1] = 2.0
    out = torch.empty_like(x)
    function(out, x, weights, 0.0)
    return not torch.allclose(out, weights[:, None].expand_as(x))


def layer_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, called for each layer where there are several."""

    @functools.wraps(original)
    def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() < 2:
            original(out, input, weight, epsilon)
            return
        for parts in zip(out, input, weight, strict=True):
            original(*parts, epsilon)

    return rms_norm


NORMS = (
    Patch(
        name="stacked_norms",
        symbol="vllm._custom_ops:rms_norm",
        reason="DFlash's drafts of several layers read the context through keys that were normed with the first layer's "
        "weights: fewer tokens were accepted, never wrong ones",
        upstream="for XPU vllm PR 56431; for CPUs no issue that we know",
        versions="0.24–0.32, each probed; 0.24's own drafts norm layer by layer",
        needed=takes_the_first_weight,
        replacement=layer_by_layer,
        guard=Guard(parameters=("out", "input", "weight", "epsilon"), landmarks=("torch.ops._C.rms_norm(",)),
    ),
)
