"""The attention of an unroll in torch's fused kernels: scores are never in memory, forwards or backwards.

A row attends to step 0 up to itself and to its own column of later steps. A fused causal kernel does the first part and says its
log-sum-exp; the few columns are merged in by theirs, and the kernel's own backward pass, given the merged output and the merged
log-sum-exp, yields the exact gradients of its part (FlashAttention, arXiv 2205.14135, section 3.1 and appendix B.2; ring
attention joins its blocks the same way, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten

#: q, k, v [B, heads, S, D] -> output, log-sum-exp [B, heads, S or more], what its backward pass wants beside them
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, tuple[Any, ...]]]
#: gradient of the output, q, k, v, output, log-sum-exp, the rest -> gradients of q, k, v
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Any, ...]], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """One of torch's causal attention kernels, scaled by D ** -0.5."""

    name: str
    forward: Forward
    backward: Backward


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out, lse, ()


def _cpu_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _rest: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, lse, 0.0, True
    )
    return grads


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    out, lse, *rest = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    return out, lse, tuple(rest)


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = [True, True, True, False]  # no gradient of a bias, which is not there
    grads = _aten._scaled_dot_product_efficient_attention_backward(g, q, k, v, None, out, lse, *rest, 0.0, wanted, True)
    return grads[0], grads[1], grads[2]


CPU = Kernel("flash attention for CPUs", _cpu_forward, _cpu_backward)
EFFICIENT = Kernel("memory-efficient attention", _efficient_forward, _efficient_backward)


def kernel_for(device_type: str, dtype: torch.dtype, head_dim: int) -> Kernel | None:
    """The kernel for such tensors; None on a card for another dtype than float32, in which drafts are trained."""
    if device_type == "cpu":
        return CPU
    return EFFICIENT if device_type == "cuda" and dtype == torch.float32 and head_dim % 4 == 0 else None


class _Merged(torch.autograd.Function):
    """Causal attention to step 0 by ``kernel``, merged with each row's own column.

    q [B, heads, S, D]; keys and values [B, KV, S, D], kept as they are: those of each query head exist while a kernel runs.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k0: Tensor, v0: Tensor, *column: Tensor) -> Tensor:
        causal, lse, rest = kernel.forward(q, _spread(k0, q), _spread(v0, q))
        rows, wide = q.shape[2], lse.dtype
        own = [_scores(q, k, wide) for k in column[0::2]]
        merged = torch.logsumexp(torch.stack([lse[..., :rows], *own]), 0)
        out = causal * _as(q, (lse[..., :rows] - merged).exp())
        for score, v in zip(own, column[1::2], strict=True):
            out = out + _spread(v, q) * _as(q, (score - merged).exp())
        if lse.shape[-1] != rows:  # some kernels keep rows beyond the last one, which they want back
            merged = torch.cat([merged, lse[..., rows:]], dim=-1)
        ctx.kernel, ctx.rest = kernel, rest
        ctx.save_for_backward(q, k0, v0, out, merged, *column)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, merged, *column = ctx.saved_tensors
        g = grads[0].contiguous()
        dq, dk0, dv0 = ctx.kernel.backward(g, q, _spread(k0, q), _spread(v0, q), out, merged, ctx.rest)
        merged = merged[..., : q.shape[2]]
        mean = (g * out).sum(-1).to(merged.dtype)
        found = [_gather(dk0, k0), _gather(dv0, v0)]
        for k, v in zip(column[0::2], column[1::2], strict=True):
            weight = (_scores(q, k, merged.dtype) - merged).exp()
            slope = _as(q, weight * ((g * _spread(v, q)).sum(-1).to(merged.dtype) - mean) * q.shape[-1] ** -0.5)
            dq = dq + slope * _spread(k, q)
            found += [_gather(slope * q, k), _gather(g * _as(q, weight), v)]
        return (None, dq, *found)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, KV, S, D] of each query head, [B, heads, S, D]."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _gather(gradient: Tensor, like: Tensor) -> Tensor:
    """The reverse of ``_spread`` for gradients: their sum over the query heads that share a key's head."""
    batch, heads, rows, dim = like.shape
    return gradient.reshape(batch, heads, -1, rows, dim).sum(2)


def _scores(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, heads, S]: each row's score of its own key."""
    scores: Tensor = (q * _spread(k, q)).sum(-1).to(dtype) * q.shape[-1] ** -0.5
    return scores


def _as(q: Tensor, weights: Tensor) -> Tensor:
    """Weights [B, heads, S] as factors of [B, heads, S, D], in q's dtype."""
    return weights.unsqueeze(-1).to(q.dtype)


def fused_column_attention(kernel: Kernel, q: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``attention.column_attention`` by a fused kernel; the same shapes and values."""
    arguments = [tensor.transpose(1, 2) for pair in pairs for tensor in pair]
    out: Any = _Merged.apply(kernel, q.transpose(1, 2), *arguments)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).reshape(q.shape)  # type: ignore[no-any-return]
