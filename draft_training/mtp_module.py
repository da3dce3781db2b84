"""MtpLayer: MiMo's layer in plain torch, the same maths as vLLM's ``mimo_mtp.py``, behind the interface of a draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_training.attention import Attention
from draft_training.batch import PackedBatch
from draft_training.draft import DraftKind
from draft_training.files import places
from draft_training.layers import MLP, Linear, RMSNorm
from draft_training.model import rotary
from draft_training.mtp import PREFIX, MtpShape
from draft_training.rope import Rope
from draft_training.weights import check_values, read_tensors


class MtpLayer(nn.Module):
    """The policy's embedding and head come as arguments; parameters carry the names of checkpoints."""

    def __init__(self, config: MtpShape, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        layer = config.layer
        self.rope = Rope.from_hf(config.hf)
        h, inner, eps = layer.hidden_size, layer.intermediate_size, layer.rms_norm_eps
        self.head_dim = layer.heads[2]
        with torch.device(device):
            for name in ("token", "hidden", "input", "post_attention", "final"):
                setattr(self, f"{name}_layernorm", RMSNorm(h, eps))
            self.input_proj = Linear(2 * h, h)
            self.self_attn = Attention(h, h, layer.heads, bias=True)
            self.mlp = MLP(h, inner)
        self.to(device=device, dtype=dtype)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """By the names that the target's checkpoint has for them, which the engine renames."""
        tensors = super().state_dict(*args, **kwargs)
        return {PREFIX + name: t for name, t in tensors.items()}

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        """The policy's LM head, [V, H], which the MTP layer shares."""
        return lm_head.detach(), None

    def states(self, batch: PackedBatch, embed: Tensor, steps: int) -> Iterator[Tensor]:
        """The final norm's output [N, H] of each step, which is also what the next one reads, as in the engine."""
        layer: Any = self
        dtype = self.input_proj.weight.dtype
        positions = batch.positions
        hidden, following, table = batch.aux.detach().to(dtype), batch.next_rows(steps), batch.embedded(embed)
        past: list[tuple[Tensor, Tensor]] = []
        for j in range(steps):
            embeds = F.embedding(following[j], table).to(dtype)
            embeds = embeds.masked_fill((positions + j == 0)[:, None], 0.0)  # vLLM: no token stands before the first
            x = self.input_proj(torch.cat([layer.hidden_layernorm(hidden), layer.token_layernorm(embeds)], dim=-1))
            cos, sin = rotary(self.rope, self.head_dim, positions + j, x.dtype)
            x = x + self.self_attn(layer.input_layernorm(x), cos, sin, batch.lengths, past)
            hidden = layer.final_layernorm(x + self.mlp(layer.post_attention_layernorm(x)))
            yield hidden


class MtpKind(DraftKind[MtpShape]):
    """The layer alone; whatever else the target's checkpoint holds is the policy's."""

    def build(self, device: torch.device | str, dtype: torch.dtype) -> MtpLayer:
        """See ``DraftKind``."""
        return MtpLayer(self.shape, device, dtype)

    def of_checkpoint(self, folder: Path) -> dict[str, Tensor] | None:
        """The layer that the target's own checkpoint holds, by its names there; None if it holds none.

        Raises:
            DraftConfigError: if what it holds is not this layer.
            CheckpointError: if a file cannot be read.
        """
        indexed, tensors = places(folder), dict[str, Tensor]()
        holders = {file for name, file in (indexed or {}).items() if name.startswith(PREFIX)}
        for file in sorted(folder.glob("*.safetensors") if indexed is None else holders):
            tensors |= read_tensors(file, lambda name: name.startswith(PREFIX))
        if not tensors:
            return None
        self.check(tensors)
        check_values(tensors, folder)
        return tensors
