"""The training-time test of EAGLE-3: the unrolled loss, and an honest estimate of the acceptance length it buys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_training.acceptance import conditional_acceptance
from draft_training.batch import PackedBatch
from draft_training.chains import chain_weights, shifted
from draft_training.draft import Draft

#: elements of one vocabulary-sized temporary, rows * V: on a CPU; and on a card, where few rows would not repay reading the head
CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CARD = 1 << 24, 1 << 26


def chunk_elements_on(device: torch.device) -> int:
    """The bound on rows * V of a temporary there."""
    return CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS_ON_CARD


@dataclass(frozen=True)
class LossStats:
    """Raw sums of one or more batches, to be added across batches and ranks before dividing. All float64."""

    count: Tensor  # [J] valid positions of each step
    kl: Tensor  # [J] sum of KL(target || draft), nats
    accepted: Tensor  # [J] replayed rounds whose first j + 1 drafted tokens are the tokens that the policy sampled
    rounds: Tensor  # [] replayed rounds

    @classmethod
    def zeros(cls, steps: int, device: torch.device | str = "cpu") -> LossStats:
        """Nothing measured yet of J = ``steps``: the neutral element of addition."""
        return cls.unpack(torch.zeros(3 * steps + 1, dtype=torch.float64, device=device))

    def pack(self) -> Tensor:
        """All sums in one vector [3 * J + 1], for one all-reduce."""
        return torch.cat([self.count, self.kl, self.accepted, self.rounds.reshape(1)])

    @classmethod
    def unpack(cls, vector: Tensor) -> LossStats:
        """The sums in a vector [3 * J + 1] that ``pack`` made."""
        count, kl, accepted = vector[:-1].view(3, -1)
        return cls(count, kl, accepted, vector[-1])

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats.unpack(self.pack() + other.pack())

    def first(self, steps: int) -> LossStats:
        """Those of the first unrolled steps; the rounds stay those that were long enough for all."""
        return LossStats(self.count[:steps], self.kl[:steps], self.accepted[:steps], self.rounds)

    @property
    def loss(self) -> float:
        """Sum over steps of the mean KL, in nats; 0.0 where nothing was counted."""
        return float((self.kl / self.count.clamp_min(1)).sum())

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target forward with J drafted tokens, bonus included; 1.0 when no round was replayed.

        Every rollout is replayed as the engine would have decoded it: a round starts at an anchor, the first n of J
        greedy draft tokens equal the tokens that the policy sampled there, and the next round starts n + 1 tokens on.
        With a greedy draft, rejection sampling emits the drafted token exactly when it accepts it, so on the policy's own
        samples "the draft equals the sample" *is* acceptance, at whatever temperature they were drawn, and teacher
        forcing is exact because a chain goes on only while the two agree. Rounds, not positions, are averaged: hard
        stretches take more rounds, so ``1 + a1 + a1*a2 + ...`` of mean acceptance probabilities is biased. Rounds whose
        J tokens reach beyond the sampled span are left out.
        """
        return float(1.0 + self.accepted.sum() / self.rounds) if float(self.rounds) else 1.0

    @property
    def chances(self) -> tuple[float, ...]:
        """[J] chance that each drafted token is accepted, given those before it, from the replay; shorter where none came."""
        return conditional_acceptance(self.accepted.tolist(), float(self.rounds))


def ttt_loss(
    draft: Draft,
    batch: PackedBatch,
    embed: Tensor,  # [V, H] the policy's input embedding
    lm_head: Tensor,  # [V, H] the policy's LM head
    *,
    steps: int,
    smoothing: float | None = None,
    counts: Tensor | None = None,
    chunk_elements: int | None = None,
    cap: float | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """EAGLE-3's training-time test (arXiv 2503.01840, section 3): unroll, forward KL to the target, teacher-forced.

    With a pruned vocabulary the target's distribution is restricted to it and renormalised, and positions whose sampled token
    lies outside carry no loss though they count in the mean. (EAGLE-3's ``position_mask`` asks for the target's argmax instead,
    which takes the product with the whole head.) Logits exist for ``chunk_elements / Vd`` positions at a time, gradients
    included.

    Args:
        draft: the model; only its own parameters receive gradients.
        batch: packed documents; ``aux`` and ``last`` are data, never differentiated.
        embed: [V, H], any float dtype.
        lm_head: [V, H]; the teacher, and with the full vocabulary also the draft's head.
        steps: J, the number of drafted tokens to unroll.
        smoothing: a position weighs what hangs on it in its chain (``chains.chain_weights``), with exp(-KL) for the
            chance that it is accepted; None: all alike, as they also are for a draft that trains a head of its own.
        counts: [J] positions over which each step's mean is taken; None: those of this batch. Data-parallel ranks pass
            the all-reduced ``batch.counts(steps)`` and *sum* their gradients.
        chunk_elements: bound on rows * V of a temporary; None: ``chunk_elements_on`` the device.
        cap: of the target's logits, see ``outside.logit_cap``; the draft's have none in the engine, which changes no order.
        hidden: [J, R, H] of ``aligned_states``, where they are known already.

    Returns:
        The loss (scalar, float32 or better; differentiable) and the raw sums.
    """
    hidden = aligned_states(draft, batch, embed, steps) if hidden is None else hidden
    valid = batch.valid(steps)
    counts = batch.counts(steps) if counts is None else counts
    head, ids = draft.head(lm_head)
    teacher_head = lm_head.detach()
    if ids is not None:  # a head that is not trained holds the policy's rows already
        teacher_head = teacher_head[ids] if head.requires_grad else head.detach()
    head = head if torch.is_grad_enabled() else head.detach()
    loss, kl, match = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        head,
        batch.last[batch.rows],
        teacher_head,
        ids,
        batch.input_ids[batch.rows + 1],
        valid,
        counts.clamp_min(1).reciprocal().to(valid.device),
        max(1, (chunk_elements or chunk_elements_on(lm_head.device)) // head.shape[0]),
        cap,
        smoothing,
    )
    accepted, rounds = replay(match, valid, batch.rows)
    stats = LossStats(
        count=valid.sum(1).double(),
        kl=kl.double().sum(1),
        accepted=accepted.to(kl.device),
        rounds=rounds.to(kl.device),
    )
    return loss, stats


def aligned_states(draft: Draft, batch: PackedBatch, embed: Tensor, steps: int) -> Tensor:
    """[J, R, H]: what step j predicts at teacher row r, i.e. its normed hidden state at the anchor r - 1 - j."""
    states = draft.states(batch, embed, steps)
    return torch.stack([state[(batch.rows - 1 - j).clamp_min(0)] for j, state in enumerate(states)])


class _HeadLoss(torch.autograd.Function):
    """LM head, softmax and KL in chunks of positions; gradients are computed on the way, so no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [J, R, H]
        head: Tensor,  # [Vd, H]
        last: Tensor,  # [R, H]
        teacher_head: Tensor,  # [Vd, H] the policy's rows of the draft's tokens
        ids: Tensor | None,  # [Vd] target id of each draft id, None: the same
        sampled: Tensor,  # [R] int64 the token that the policy sampled after the teacher row
        valid: Tensor,  # [J, R] bool
        scale: Tensor,  # [J] float64 weight of one position of step j
        chunk: int,  # rows at a time
        cap: float | None,  # of the teacher's logits
        smoothing: float | None,  # of the chains' weights
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        shape = valid.shape
        kl, match = hidden.new_zeros(shape, dtype=wide), torch.zeros_like(valid)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        confidence = torch.zeros_like(kl)
        weight = scale.to(wide)
        taught = valid if ids is None else valid & torch.isin(sampled, ids)
        for start in range(0, shape[1], chunk):
            at = slice(start, min(start + chunk, shape[1]))
            teacher = _Teacher(last[at], teacher_head, wide, cap)
            for j in range(shape[0]):
                logits = (hidden[j, at].to(head.dtype) @ head.T).to(wide)
                counted = taught[j, at]
                token = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]
                match[j, at] = (token == sampled[at]) & valid[j, at]
                kl[j, at] = teacher.kl(logits) * counted
                confidence[j, at] = (-kl[j, at]).exp() * counted
                if grad_hidden is None and grad_head is None:
                    continue
                slope = logits.softmax(-1).sub_(teacher.distribution).mul_((counted * weight[j])[:, None])
                if grad_hidden is not None:
                    grad_hidden[j, at] = (slope.to(head.dtype) @ head).to(hidden.dtype)
                if grad_head is not None:
                    grad_head += slope.T @ hidden[j, at].to(wide)
        losses = kl * weight[:, None]
        if smoothing is not None and grad_head is None:  # known only here, so it can only be a factor of whole rows
            worth = chain_weights(confidence, valid, smoothing)
            losses *= worth
            if grad_hidden is not None:
                grad_hidden *= worth[..., None].to(grad_hidden.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(kl, match)
        return losses.sum(), kl, match

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        by = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * by.to(grad_hidden.dtype),
            None if grad_head is None else (grad_head * by).to(ctx.head_dtype),
            *([None] * 9),
        )


def target_logits(last: Tensor, head: Tensor, cap: float | None) -> Tensor:
    """[C, V] float32 or better: the target's logits of states [C, H] and its LM head [V, H]; ``cap`` as for ``ttt_loss``."""
    logits = last.to(head.dtype) @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _Teacher:
    """The target's distribution at a chunk of rows [C, H], over the tokens of a head [Vd, H]."""

    def __init__(self, last: Tensor, head: Tensor, wide: torch.dtype, cap: float | None) -> None:
        log_probs = target_logits(last, head, cap).to(wide).log_softmax(-1)  # [C, Vd]
        self.distribution = log_probs.exp()
        self._negative_entropy = (self.distribution * log_probs).sum(-1)

    def kl(self, logits: Tensor) -> Tensor:
        """[C]: KL(target || draft) for draft logits [C, Vd]."""
        return self._negative_entropy - (self.distribution * logits).sum(-1) + logits.logsumexp(-1)


def replay(match: Tensor, valid: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the batch's rollouts again, round by round, with the drafts' hits; see ``acceptance_length``.

    Args:
        match: [J, R] bool, step j's greedy token is the sampled one, aligned by teacher row.
        valid: [J, R] bool.
        rows: [R] int64 teacher rows, ascending; a gap starts a new sampled span.

    Returns:
        accepted [J] and rounds [], float64, on the CPU.
    """
    steps, total = match.shape
    accepted, rounds = [0] * steps, 0
    if total:
        # anchor i's chain lies on the diagonal (j, i + j)
        hit = shifted(match, -1).cumprod(0).sum(0).tolist()
        row_list, whole_list = rows.tolist(), shifted(valid, -1).all(0).tolist()
        i = 0
        while i < total:
            if not whole_list[i]:  # the tail of a span: walk to the next one
                i += 1
                continue
            rounds += 1
            for j in range(hit[i]):
                accepted[j] += 1
            i = _advance(row_list, i, hit[i] + 1)
    sums = torch.tensor([*accepted, rounds], dtype=torch.float64, device="cpu")
    return sums[:-1], sums[-1]


def _advance(rows: list[int], i: int, tokens: int) -> int:
    """The anchor ``tokens`` further, or the start of the next span when this one ends before."""
    for k in range(i + 1, min(i + tokens, len(rows) - 1) + 1):
        if rows[k] != rows[k - 1] + 1:
            return k
    return i + tokens
