"""Attention of Megatron's local layers on a CPU: padded or packed, one document at a time, over context parallel ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from torch import Tensor


class _Gathered(torch.autograd.Function):
    """The parts of all context parallel ranks, one behind the other; gradients are summed and cut."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class CpuAttention(torch.nn.Module):
    """In the place of ``DotProductAttention``: causal, grouped heads, no dropout."""

    def __init__(
        self, config: Any, layer_number: int, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any
    ) -> None:
        """As Megatron builds it; what a causal decoder does not need is passed over."""
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self._scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **_kwargs: Any,
    ) -> Tensor:
        """[S, B, heads * D] from [S, B, heads, D], or packed [T, (1,) heads * D] from [T, (1,) heads, D]."""
        if packed_seq_params is None:
            rows = [self._document(query[:, i], key[:, i], value[:, i]) for i in range(query.shape[1])]
            return torch.stack(rows, 1)
        batched = query.dim() == 4
        if batched:
            query, key, value = query[:, 0], key[:, 0], value[:, 0]
        borders = (packed_seq_params.cu_seqlens_q // mpu.get_context_parallel_world_size()).tolist()
        spans = itertools.pairwise(borders)
        out = torch.cat([self._document(query[a:b], key[a:b], value[a:b]) for a, b in spans])
        return out[:, None] if batched else out

    def _document(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One document's part on this rank, [t, heads, D] each; under context parallelism a chunk from either of its ends."""
        size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        positions = asked = torch.arange(len(query))
        if size > 1:
            group, half = mpu.get_context_parallel_group(), len(query) // 2

            def of(j: int) -> Tensor:
                ends = (j, 2 * size - j - 1)
                return torch.cat([torch.arange(chunk * half, (chunk + 1) * half) for chunk in ends])

            asked, positions = of(rank), torch.cat([of(j) for j in range(size)])
            key, value = (_Gathered.apply(x, group) for x in (key, value))  # type: ignore[no-untyped-call]
        q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        seen = asked[:, None] >= positions[None]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=self._scale)[0]
        return out.transpose(0, 1).reshape(len(query), -1)
