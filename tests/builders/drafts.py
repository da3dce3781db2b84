"""Drafts in training: a tiny target, documents, policy tensors, and a trainer of its draft."""

from __future__ import annotations

import torch

from draft_training import (
    Document,
    DraftTrainer,
    HiddenBuffer,
    TrainSettings,
    digest,
)

TINY = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 128,
}
SETTINGS = TrainSettings(tokens_per_step=60, warmup_steps=2, lr=3e-3, ttt_steps=2)


def make_document(n: int, seed: int, version: int = 0, prompt: int = 3, dtype: torch.dtype = torch.float32) -> Document:
    g = torch.Generator().manual_seed(seed)
    h = TINY["hidden_size"]
    return Document(
        input_ids=torch.randint(0, TINY["vocab_size"], (n,), generator=g),
        aux=torch.randn(n, 3 * h, generator=g, dtype=dtype),
        last=torch.randn(n, h, generator=g, dtype=dtype),
        loss_mask=torch.arange(n) >= prompt,
        policy_version=version,
    )


def make_policy(seed: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (TINY["vocab_size"], TINY["hidden_size"])
    return torch.randn(shape, generator=g, dtype=dtype), torch.randn(shape, generator=g, dtype=dtype)


def make_buffer(seed: int = 0, documents: int = 12) -> HiddenBuffer:
    b = HiddenBuffer(10_000, 1 << 30, seed)
    for i in range(documents):
        b.add(make_document(12 + i, i, version=i % 2))
    return b


def make_trainer(config, settings: TrainSettings = SETTINGS, seed: int = 3, **kw) -> DraftTrainer:
    t = DraftTrainer(config, settings, device="cpu", seed=seed, **kw)
    t.update_policy(*make_policy(), 1)
    return t


def weights(t: DraftTrainer) -> str:
    return digest(t.engine_tensors())
