"""The draft's optimizer: Muon for its matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from draft_training.settings import TrainSettings

#: Newton-Schulz coefficients of Muon: the steepest slope at zero for which five steps keep singular values within 0.7 to 1.2
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
#: from so many rows and columns on bfloat16 saves a CPU that has it a half, at 128 a quarter and below nothing
_LARGE = 256
#: matrices whose rows are tokens
_OF_TOKENS = ("lm_head.weight", "embed_tokens.weight")


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks"), for matrices.

    Each step moves a matrix [A, B] along its orthogonalised Nesterov momentum, so that the update's singular values are
    all about ``lr * sqrt(max(1, A / B))``: the size of what it does to a layer's output then does not depend on the width
    (Bernstein & Newhouse, arXiv 2410.21265), and one rate serves drafts of any size.

    ``torch.optim.Muon`` is the same rule (``adjust_lr_fn="original"``) and orthogonalises in bfloat16 always. On a CPU
    that lacks instructions for it that took 20 to 30 times as long at hidden sizes of 128 and 256, many times the rest of a
    training step; here it is bfloat16 on a card, and on a CPU that has them for matrices of some size: half the time there.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        """See the class for the rule.

        Args:
            params: matrices [A, B].
            lr: see the class.
            momentum: of the gradients' moving average.
            weight_decay: decoupled, as a share of ``lr``.
        """
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalised(p.grad.lerp(average, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """A matrix [A, B] with singular values near 1 in the place of its own: five steps of a Newton-Schulz iteration."""
    flat = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = flat.bfloat16() if _faster_in_bfloat16(flat) else flat
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix.dtype)


def _faster_in_bfloat16(matrix: Tensor) -> bool:
    """Whether products of such matrices are: a card's, and large ones of a CPU with AVX-512 BF16."""
    if matrix.device.type == "cuda":
        return True
    return min(matrix.shape) >= _LARGE and bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())


class DraftOptimizer:
    """Muon for matrices, AdamW for the rest; one warm-up for both, and a state that can be saved.

    The rows of a head and of an embedding are tokens and their gradients nearly sparse: these take AdamW, as is usual with Muon.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainSettings) -> None:
        """Divide the parameters between the two.

        Args:
            parameters: name to parameter; matrices but for those whose rows are tokens go to Muon.
            settings: rates, betas and weight decay; what AdamW moves keeps its size.
        """
        matrices = {n: p for n, p in parameters.items() if p.ndim == 2 and not n.endswith(_OF_TOKENS)}
        rest = {n: p for n, p in parameters.items() if n not in matrices}
        #: each optimizer with its full rate and its parameters by name
        self._parts: list[tuple[torch.optim.Optimizer, float, dict[str, Tensor]]] = []
        if matrices:
            muon = Muon(matrices.values(), settings.lr, weight_decay=settings.weight_decay)
            self._parts.append((muon, settings.lr, matrices))
        if rest:
            adam = torch.optim.AdamW(rest.values(), lr=settings.vector_lr, betas=settings.betas, weight_decay=0.0)
            self._parts.append((adam, settings.vector_lr, rest))

    def zero_grad(self) -> None:
        """Set all gradients to None, which frees their memory between slices."""
        for part, _, _ in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, factor: float) -> None:
        """One step at ``factor`` of the full rates."""
        for part, lr, _ in self._parts:
            for group in part.param_groups:
                group["lr"] = lr * factor
            part.step()

    def state(self) -> dict[str, Tensor]:
        """Tensors of both optimizers, named ``<kind>.<parameter>``, for a checkpoint."""
        return {
            f"{kind}.{name}": value
            for part, _, own in self._parts
            for name, parameter in own.items()
            for kind, value in part.state.get(parameter, {}).items()
        }

    def momenta(self) -> list[Tensor]:
        """Muon's, of which a card orthogonalises the bfloat16 anyway: they may rest in it between slices."""
        return [
            state["momentum"] for part, *_ in self._parts if isinstance(part, Muon) for state in part.state.values()
        ]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``state`` returned; other names are ignored."""
        for part, _, own in self._parts:
            part.state.clear()
            kinds = ("momentum",) if isinstance(part, Muon) else ("step", "exp_avg", "exp_avg_sq")
            for name, parameter in own.items():
                if saved := {kind: tensors[f"{kind}.{name}"] for kind in kinds if f"{kind}.{name}" in tensors}:
                    # AdamW's step counts on the host
                    part.state[parameter] = {
                        kind: value.clone()
                        if kind == "step"
                        else value.to(parameter.device, parameter.dtype, copy=True)
                        for kind, value in saved.items()
                    }
