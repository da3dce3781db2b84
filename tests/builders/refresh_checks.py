"""Modules shaped like vLLM's: a weight, and one that is sharded over the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

H, V, HEADS, KV, D, I = 16, 40, 4, 2, 4, 24


class Vocab(nn.Module):
    def __init__(self, rows, padded, first=0, last=None):
        super().__init__()
        self.org_vocab_size = rows
        self.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last or rows)
        self.weight = nn.Parameter(torch.randn(padded, H), requires_grad=False)


class Weight(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape), requires_grad=False)
