"""Eagle3Draft: the EAGLE-3 draft in plain torch, the same maths and tensor names as vLLM's ``llama_eagle3.py``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draft_training.attention import Attention
from draft_training.batch import PackedBatch
from draft_training.config import DraftConfig
from draft_training.layers import MLP, Linear, RMSNorm
from draft_training.rope import Rope


class DecoderLayer(nn.Module):
    """The one layer: attention over [embedding ; hidden state], then an MLP, both residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, heads = config.hidden_size, (config.num_heads, config.num_kv_heads, config.head_dim)
        self.self_attn = Attention(2 * h, h, heads)
        self.mlp = MLP(h, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        embeds: Tensor,  # [N, H]
        hidden: Tensor,  # [N, H]
        cos: Tensor,  # [N, head_dim]
        sin: Tensor,  # [N, head_dim]
        lengths: tuple[int, ...],
        past: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The residual stream after the layer, [N, H]; normed it goes to the head, and it or its norm is fed back."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        residual = residual + self.self_attn(x, cos, sin, lengths, past)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Draft(nn.Module):
    """The draft's own parameters; the embedding, and the LM head unless pruned, are the policy's and come as arguments.

    Parameter names are those of vLLM's checkpoint: ``fc``, ``midlayer.*``, ``norm`` and, only with a pruned vocabulary,
    ``lm_head`` with the buffers ``d2t`` (int64 offsets: draft id i is target id ``i + d2t[i]``) and ``t2d`` (bool [V]).
    Parameters are created uninitialised on ``device``; call ``layers.initialise``.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: DraftConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size)
        self.midlayer = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.pruned:
            self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64, device="cpu"))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu"))
            self.set_vocabulary(torch.arange(config.draft_vocab_size, device="cpu"))
        self.to(device=device, dtype=dtype)

    def vocabulary(self) -> Tensor:
        """[draft_vocab_size] int64: the target id of each draft id (pruned drafts only)."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Choose the pruned vocabulary.

        Args:
            target_ids: [draft_vocab_size] int64, distinct; stored in ascending order.
        """
        ids = target_ids.to(self.d2t.device).sort().values
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()[ids] = True

    @torch.no_grad()
    def refresh_head(self, lm_head: Tensor) -> None:
        """Copy the policy's rows of the draft vocabulary into the pruned head (lm_head: [V, H])."""
        ids = self.vocabulary().to(lm_head.device)
        self.lm_head.weight.copy_(lm_head.detach()[ids])

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        """The policy's head [V, H]; of a pruned vocabulary its own [Vd, H], and the target id of each row."""
        return (self.lm_head.weight, self.vocabulary()) if self.config.pruned else (lm_head.detach(), None)

    def states(self, batch: PackedBatch, embed: Tensor, steps: int) -> Iterator[Tensor]:
        """``unroll`` over the documents of a batch."""
        return self.unroll(batch.aux.detach(), batch.next_rows(steps), batch.lengths, batch.embedded(embed), steps)

    def unroll(
        self,
        aux: Tensor,  # [N, A * H] hidden states that enter the target's auxiliary layers
        following: Tensor,  # [steps, N] int64: row of ``embeds`` for token t + 1 + j of the document that row t is of
        lengths: tuple[int, ...],  # tokens of each packed document, sum == N
        embeds: Tensor,  # [., H] embeddings of the policy's, not trained
        steps: int,
    ) -> Iterator[Tensor]:
        """Yield the normed hidden states [N, H] of each step of the training-time test (arXiv 2503.01840, section 3).

        Step j of row t is what the engine computes for its (j+1)-th drafted token after position t: position t + j,
        attending to the step-0 keys up to t and to its own steps 1..j, fed with its own previous hidden state.
        """
        dtype = self.fc.weight.dtype
        positions = torch.cat([torch.arange(n, device=aux.device) for n in lengths])
        hidden: Tensor = self.fc(aux.to(dtype))
        past: list[tuple[Tensor, Tensor]] = []
        for j in range(steps):
            cos, sin = rotary(self.config.rope, self.config.head_dim, positions + j, dtype)
            read = F.embedding(following[j], embeds.detach()).to(dtype)
            hidden = self.midlayer(read, hidden, cos, sin, lengths, past)
            normed: Tensor = self.norm(hidden)
            yield normed
            hidden = normed if self.config.norm_output else hidden


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """transformers' inverse frequencies, [head_dim / 2] float32, and its factor of cosines and sines."""
    if rope.type == "default":  # transformers 5 has no function for it
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(torch.float32) / head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    parameters = {**(rope.scaling_to_hf() or {}), "rope_theta": rope.theta}
    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,  # this and the heads: read in any case, and used where there is no head_dim
        num_attention_heads=1,
        rope_theta=rope.theta,  # this and the next: of transformers 4
        rope_scaling=parameters,
        rope_parameters=parameters,  # this and the next: of transformers 5
        standardize_rope_params=lambda: None,
    )
    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope.type](config, device)
    return found


def rotary(rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, head_dim] of each position [N], computed in float32 (neox style: halves, not pairs)."""
    inverse, factor = inverse_frequencies(rope, head_dim, positions.device)
    angles = positions[:, None].to(torch.float32) * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
