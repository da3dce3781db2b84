"""Functions of a distribution over the vocabulary and a token, each of mean zero if the token was sampled from it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: of ``statistics_of``, in their order
NAMES = ("the likeliest token", "unlikely tokens", "surprise", "tokens that hardly occur")
#: probability mass of the tokens that count as unlikely, and of those that hardly occur
_UNLIKELY, _RARE = 0.1, 1e-4
#: rows of the head that are multiplied at once: on a CPU what its cache holds in float32, on a card few launches
_ROWS, _ROWS_ON_CARD = 128, 8192
#: so many tokens at once are multiplied as fast as any fewer; what is left over would cost a half more
_TILE = 16
#: nats by which a token's surprise may differ from the entropy; what is beyond counts as so much
_CLIP = 4.0


def log_law(last: Tensor, head: Tensor, temperature: float, cap: float | None) -> Tensor:
    """The distribution of the next token, log p [n, V] float32.

    Args:
        last: [n, H] outputs of the policy's final norm, on the device of ``head``.
        head: [V, H] its LM head.
        temperature: of the rollouts, above 0.
        cap: c of logits that are c * tanh(last @ head.T / c); None: none.
    """
    # in float32 and in parts, of which each is converted once: half precision is slow on most CPUs, and a float32 copy of the
    # whole head is 2.5 GB at a vocabulary of 152k and a width of 4096
    most = _ROWS_ON_CARD if head.device.type == "cuda" else _ROWS
    whole = functional.pad(last.float(), (0, 0, 0, -len(last) % _TILE)).T.contiguous()
    made, part = whole.new_empty(len(head), whole.shape[1]), whole.new_empty(most, head.shape[1])
    for rows, out in zip(torch.split(head, most), torch.split(made, most), strict=True):
        torch.mm(part[: len(rows)].copy_(rows), whole, out=out)
    logits = made.T[: len(last)].contiguous()
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    return logits.div_(temperature).log_softmax(-1)


def statistics_of(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Of each token f with sum_y p(y) f(y) = 0, [n, 4] float64, in the order of ``NAMES``.

    1. Is it the likeliest one, less the chance of that. In [-1, 1].
    2. Does it belong to the least likely tokens that have a tenth of the mass together, less that tenth; a token at the edge,
       or several of one probability there, count in part. In [-0.1, 0.9].
    3. log p(y) plus the entropy, clipped to 4 nats either way, less the mean of that, over 4. In [-2, 2].
    4. As 2, of the least likely tokens that have 1e-4 of the mass together.

    Args:
        log_p: [n, V] float32 or float64.
        tokens: [n] int64 that were sampled.
    """
    p = log_p.exp()
    at = tokens[:, None]
    log_y = log_p.gather(1, at)
    top, first = p.max(-1, keepdim=True)
    likeliest = (first == at).double() - top
    below = p.masked_fill(log_p >= log_y, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    alike = p.masked_fill(log_p != log_y, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    unlikely, rare = (((m - below) / alike.clamp_min(1e-300)).clamp(0.0, 1.0) - m for m in (_UNLIKELY, _RARE))
    entropy = -(p * log_p.clamp_min(-1e4)).sum(-1, keepdim=True)
    mean = (log_p + entropy).clamp_(-_CLIP, _CLIP).mul_(p).sum(-1, keepdim=True, dtype=torch.float64)
    surprise = ((log_y + entropy).clamp(-_CLIP, _CLIP) - mean) / _CLIP
    return torch.cat([likeliest, unlikely, surprise, rare], 1)
