"""What draft training could descend instead of its forward KL: the losses of the field, written out plainly for a comparison.

The formulas are those that speculators names in 0.9 (``losses/eager.py``), with the papers behind them; p is the target's
distribution, q the draft's, at a token that the target sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_training import DraftTrainer, LossStats
from draft_training.batch import PackedBatch
from draft_training.chains import chain_weights
from draft_training.loss import aligned_states, ttt_loss

#: log p [1, R, V] and log q [J, R, V] -> loss of each position [J, R]
Loss = Callable[[Tensor, Tensor], Tensor]
SMOOTHING = 0.5  # D-PACE's alpha, as its paper has it (arXiv 2605.18810)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q), nats."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q || p), nats."""
    return (q.exp() * (q - p)).sum(-1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """The mean of both divergences to the mixture, nats."""
    mixed = torch.logaddexp(p.expand_as(q), q) - math.log(2.0)
    return ((p.exp() * (p - mixed)).sum(-1) + (q.exp() * (q - mixed)).sum(-1)) / 2


def cross_entropy(p: Tensor, q: Tensor) -> Tensor:
    """-log q of the target's argmax."""
    best = p.argmax(-1, keepdim=True).expand(*q.shape[:-1], 1)
    return -q.gather(-1, best).squeeze(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum of min(p, q): the chance that a token drawn from q is accepted."""
    return torch.minimum(p.exp().expand_as(q), q.exp()).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """1 - overlap."""
    return 1 - overlap(p, q)


def negative_log_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """-log overlap (LK losses, arXiv 2602.23881)."""
    return -overlap(p, q).clamp_min(1e-5).log()


def lk_hybrid(p: Tensor, q: Tensor) -> Tensor:
    """KL where the overlap is small, total variation where it is large: weight exp(-3 overlap) of KL (arXiv 2602.23881)."""
    shared = overlap(p, q)
    weight = (-3 * shared.detach()).exp()
    return weight * kl(p, q) + (1 - weight) * (1 - shared)


def mostly_total_variation(p: Tensor, q: Tensor) -> Tensor:
    """0.1 cross entropy + 0.9 total variation, the mix that speculators' help gives as its example."""
    return 0.1 * cross_entropy(p, q) + 0.9 * total_variation(p, q)


def greedy_hit(p: Tensor, q: Tensor) -> Tensor:
    """-log of sum p q: the chance that a draft that is all but greedy hits the sample; ours, since engines draft greedily."""
    return -torch.logsumexp(p + q, -1)


@dataclass(frozen=True)
class Objective:
    """A loss of each position, and how positions of a chain are weighed."""

    loss: Loss
    weighted: bool = False  # by D-PACE, with confidence exp(-loss)


OBJECTIVES: Mapping[str, Objective] = {
    "kl": Objective(kl),
    "reverse-kl": Objective(reverse_kl),
    "jsd": Objective(jensen_shannon),
    "ce": Objective(cross_entropy),
    "tv": Objective(total_variation),
    "nla": Objective(negative_log_acceptance),
    "lk-hybrid": Objective(lk_hybrid),
    "ce-tv": Objective(mostly_total_variation),
    "hit": Objective(greedy_hit),
    "d-pace": Objective(cross_entropy, weighted=True),
    "kl-d-pace": Objective(kl, weighted=True),
}


class OtherTrainer(DraftTrainer):
    """A trainer that descends another objective, each step's positions in the mean; for a full vocabulary."""

    objective = OBJECTIVES["kl"]

    def _loss(self, batch: PackedBatch, embed: Tensor, lm_head: Tensor, counts: Tensor) -> tuple[Tensor, LossStats]:
        hidden = aligned_states(self.draft, batch, embed, counts.numel())
        with torch.no_grad():
            _, stats = ttt_loss(self.draft, batch, embed, lm_head, steps=counts.numel(), counts=counts, hidden=hidden)
            p = (batch.last[batch.rows].to(lm_head.dtype) @ lm_head.T).log_softmax(-1)[None]
        q = (hidden @ self.draft.head(lm_head)[0].T).log_softmax(-1)
        loss, valid = self.objective.loss(p, q), batch.valid(counts.numel())
        weight = valid
        if self.objective.weighted:
            weight = chain_weights((-loss.detach()).exp(), valid, SMOOTHING)
        return ((loss * weight).sum(1) / counts.clamp_min(1)).sum(), stats
