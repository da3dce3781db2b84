"""Attention of the training-time test, per document; memory linear in the document's length."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from draft_training.fused_attention import Kernel, fused_column_attention, kernel_for
from draft_training.layers import Linear

_log = logging.getLogger(__name__)

QUERY_CHUNK = 256  # queries whose scores are alive at once
PADDING_WASTE = 1.25  # documents share a padded batch while it stays below this multiple of their tokens


class Attention(nn.Module):
    """Grouped-query attention; ``heads``, key-value heads and head dimension; ``bias`` of queries, keys and values."""

    def __init__(self, inputs: int, outputs: int, heads: tuple[int, int, int], bias: bool = False) -> None:
        super().__init__()
        queries, keys, self.head_dim = heads
        self.q_proj = Linear(inputs, queries * self.head_dim, bias)
        self.k_proj = Linear(inputs, keys * self.head_dim, bias)
        self.v_proj = Linear(inputs, keys * self.head_dim, bias)
        self.o_proj = Linear(queries * self.head_dim, outputs)

    def forward(
        self,
        x: Tensor,  # [N, inputs] packed documents
        cos: Tensor,  # [N, head_dim]
        sin: Tensor,  # [N, head_dim]
        lengths: tuple[int, ...],  # tokens of each document, sum == N
        past: list[tuple[Tensor, Tensor]],  # keys and values of earlier steps; this step's are appended
    ) -> Tensor:
        """[N, outputs]. Step 0 (``past`` empty) is causal; step j also sees its own row of steps 1..j, not their neighbours."""
        n = x.shape[0]
        q, k, v = (project(x).view(n, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        past.append((k, v))
        out: Tensor = self.o_proj(packed_attention(q, past, lengths).reshape(n, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding: x [N, heads, D], cos and sin [N, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def packed_attention(
    q: Tensor,  # [N, heads, D]
    past: list[tuple[Tensor, Tensor]],  # step 0..j: keys and values [N, kv_heads, D]
    lengths: tuple[int, ...],
) -> Tensor:
    """[N, heads, D]: each document by itself, documents of similar length in one padded batch.

    Padding stands at the end of a document, where a causal mask hides it from every real row.
    """
    outputs: list[Tensor] = [q] * len(lengths)
    split = [torch.split(tensor, list(lengths)) for pair in past for tensor in pair]
    queries = torch.split(q, list(lengths))
    for group in similar_lengths(lengths):
        padded = [pad_sequence([part[i] for i in group], batch_first=True) for part in split]
        pairs = list(zip(padded[0::2], padded[1::2], strict=True))
        out = column_attention(pad_sequence([queries[i] for i in group], batch_first=True), pairs)
        for row, i in enumerate(group):
            outputs[i] = out[row, : lengths[i]]
    return torch.cat(outputs)


def similar_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Document indices grouped so that padding each group to its longest costs at most PADDING_WASTE."""
    groups: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= PADDING_WASTE * (tokens + lengths[i]):
            groups[-1].append(i)
            tokens += lengths[i]
        else:
            groups.append([i])
            tokens = lengths[i]
    return groups


def column_attention(q: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Causal attention to step 0 merged with the row's own column of later steps.

    Args:
        q: [B, S, heads, D] queries of the last step in ``pairs``.
        pairs: keys and values [B, S, kv_heads, D] of steps 0..j.

    Returns:
        [B, S, heads, D]; by a fused kernel where torch has one for such tensors.
    """
    kernel = proven_kernel(q.device, q.dtype, q.shape[-1])
    return explicit_column_attention(q, pairs) if kernel is None else fused_column_attention(kernel, q, pairs)


def explicit_column_attention(q: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``column_attention`` by explicit scores: at most those of QUERY_CHUNK queries exist at a time, backwards as well."""
    batch, length, heads, dim = q.shape
    kv_heads = pairs[0][0].shape[2]
    q = q.view(batch, length, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4)  # [B, KV, S, G, D]
    keys_values = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]  # [B, KV, S, D]
    chunks = []
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        (k0, v0), columns = keys_values[0], keys_values[1:]
        column = [t[:, :, start:stop] for pair in columns for t in pair]
        arguments = (q[:, :, start:stop], k0[:, :, :stop], v0[:, :, :stop], *column)
        if length <= QUERY_CHUNK or not torch.is_grad_enabled():
            chunks.append(_attend(*arguments))
        else:
            chunks.append(checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False))
    out = torch.cat(chunks, dim=2)  # [B, KV, S, G, D]
    return out.permute(0, 2, 1, 3, 4).reshape(batch, length, heads, dim)


def _attend(q: Tensor, k0: Tensor, v0: Tensor, *column: Tensor) -> Tensor:
    """One chunk: q [B, KV, C, G, D] are the last C of the E positions of k0, v0 [B, KV, E, D]; columns [B, KV, C, D]."""
    batch, kv_heads, chunk, group, dim = q.shape
    end = k0.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.reshape(batch, kv_heads, chunk * group, dim)
    scores = (rows @ k0.transpose(-1, -2)).to(wide).view(batch, kv_heads, chunk, group, end) * dim**-0.5
    position = torch.arange(end, device=q.device)
    hidden = position[None, :] > position[end - chunk :, None]  # [C, E]
    scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    own = [(q * k[:, :, :, None]).sum(-1, keepdim=True).to(wide) * dim**-0.5 for k in column[0::2]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(q.dtype)
    out = (weights[..., :end].reshape(batch, kv_heads, chunk * group, end) @ v0).view(q.shape)
    for j, v in enumerate(column[1::2]):
        out = out + weights[..., end + j, None] * v[:, :, :, None]
    return out


@cache
def proven_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel | None:
    """The fused kernel for such tensors, if it is as exact as explicit scores, forwards and backwards; asked once a process.

    torch calls these operations internal, and another release may change what they take or return: then explicit scores serve,
    which are slower, and one warning says so.
    """
    kernel = kernel_for(device.type, dtype, head_dim)
    if kernel is None:
        return None
    try:
        error, usual = _errors(partial(fused_column_attention, kernel), device, dtype, head_dim)
    except Exception as failure:
        problem = f"{type(failure).__name__}: {failure}"
    else:
        if error <= 4 * usual + 64 * torch.finfo(torch.float64).eps:  # a NaN is not
            return kernel
        problem = f"it is off by {error:.2g} of the largest value, explicit scores by {usual:.2g}"
    _log.warning(
        "spec-plugin: %s of torch %s cannot be used, the draft trains with explicit scores, which is slower: %s",
        kernel.name,
        torch.__version__,
        problem,
    )
    return None


def _errors(
    attend: Callable[[Tensor, list[tuple[Tensor, Tensor]]], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
) -> tuple[float, float]:
    """How far ``attend`` and explicit scores are from explicit scores in float64, output and gradients, each relative to its
    largest value.
    """
    shapes = [(2, 37, 4, head_dim), *[(2, 37, 2, head_dim)] * 6]  # queries, and keys and values of three steps
    own = torch.Generator().manual_seed(0)  # the trainer's samples must not change (law 1)
    parts = [torch.randn(shape, generator=own).to(dtype).to(device) for shape in shapes]

    def results(tensors: list[Tensor], by: Callable[[Tensor, list[tuple[Tensor, Tensor]]], Tensor]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = by(leaves[0], list(zip(leaves[1::2], leaves[2::2], strict=True)))
        slope = torch.arange(out.numel(), dtype=torch.float64).cos().to(out).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * slope).sum(), leaves)]

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        exact = results([part.double() for part in parts], explicit_column_attention)
        found, usual = results(parts, attend), results(parts, explicit_column_attention)
    worst = [
        max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(of, exact, strict=True))
        for of in (found, usual)
    ]
    return worst[0], worst[1]
