"""vLLM's convolutions of gated delta nets on a CPU without bfloat16 instructions, where torch takes thirty times as long."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch

_PLACE = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_REASON = (
    "one verification step of sixteen requests took seconds, and the self-test ran out of time: torch convolves bfloat16 on this "
    "CPU channel by channel"
)


class _InFloat32:
    """``torch.nn.functional`` for code that calls it F: its convolution adds up in float32 and rounds at the end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)

    @staticmethod
    def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        own = None if bias is None else bias.float()
        return functional.conv1d(x.float(), weight.float(), own, **options).to(x.dtype)


def convolves_slowly(function: Any) -> bool:
    """True if a function's F is torch's own, and torch has no kernels for bfloat16 on this CPU."""
    own = function.__globals__.get("F") is functional
    return own and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def in_float32(original: Any) -> Callable[..., Any]:
    """A copy of the function whose ``F`` is ``_InFloat32``."""
    copy = types.FunctionType(
        original.__code__, {**original.__globals__, "F": _InFloat32()}, original.__name__, original.__defaults__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


CONVOLUTIONS = (
    Patch(
        name="drafted_convolution",
        symbol=f"{_PLACE}:_spec_forward",
        reason=_REASON,
        upstream="no issue that we know",
        versions="0.29.0",
        optional=True,
        needed=convolves_slowly,
        replacement=in_float32,
        guard=Guard(
            parameters=None,
            landmarks=("F.conv1d(conv_in, w, bias, groups=dim)",),
        ),
    ),
    Patch(
        name="prompt_convolution",
        symbol=f"{_PLACE}:causal_conv1d_torch",
        reason=_REASON,
        upstream="no issue that we know",
        versions="0.24.0 and 0.29.0",
        optional=True,
        needed=convolves_slowly,
        replacement=in_float32,
        guard=Guard(
            parameters=None,
            landmarks=("F.conv1d(",),
        ),
    ),
)
