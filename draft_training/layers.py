"""Linear and RMSNorm without torch's own initialisation, which would draw from the global random stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """Linear map, uninitialised; ``weight`` is [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32, device="cpu"))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float32, device="cpu")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Linear layer, [..., inputs] to [..., outputs]."""
        return F.linear(x, self.weight, self.bias)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), without biases."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(size, inner), Linear(size, inner), Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        """Feed-forward layer, [N, H] to [N, H]; the residual is added by the caller."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, dtype=torch.float32, device="cpu")), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Matrices from ``generator`` (on the CPU, so that every device gets the same draft), norms one, biases zero."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            noise = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(noise.normal_(0.0, std, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
