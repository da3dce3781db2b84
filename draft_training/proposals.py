"""What a draft's proposals make of recorded text: its likeliest tokens, or draws from it at several temperatures.

A greedy proposal is accepted with the policy's probability of the draft's likeliest token; a *sampled* one with sum min(p, q),
however flat the policy is (speculative sampling, arXiv 2302.01318 and 2211.17192). Which makes more depends on policy and draft
alike, so both are replayed on what the policy sampled.

Verification emits y ~ p whatever was drafted. Jointly "y is emitted and it was the draft's" has probability min(p(y), q(y)), so
given the recorded y its chain goes on with min(1, q(y) / p(y)), and for greedy proposals with 1 if y is the draft's likeliest
token. While a chain goes on draft and text agree, so that teacher forcing is exact. The walk over anchors is summed out, not
drawn: each anchor is visited with the chance that a round begins there. A mean over positions would be biased, since accepted
tokens alone are not distributed as p, and hard stretches take more rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draft_training.acceptance import conditional_acceptance
from draft_training.batch import PackedBatch
from draft_training.chains import shifted
from draft_training.draft import Draft
from draft_training.loss import chunk_elements_on, target_logits

#: temperatures of a draft that are replayed, as factors of the rollouts': 0 proposes the likeliest token, 1 draws at theirs
DRAFT_TEMPERATURES = (0.0, 1.0, 0.85, 0.7, 0.5)
#: a chain that goes on with less than this chance is taken to end: logits for all of them would cost several times as much
_OVER = 0.01


@dataclass(frozen=True)
class Sampled:
    """How the rollouts sample from the policy."""

    temperature: float = 1.0  # above 0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    def log_probs(self, logits: Tensor) -> Tensor:
        """[C, V] of logits [C, V]: as vLLM has it, temperature first, then the likeliest k, then the fewest that hold p."""
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k, dim=-1).values[:, -1:], -torch.inf)
        if self.top_p < 1.0:
            ranked, order = logits.softmax(-1).sort(-1, descending=True)
            beyond = (ranked.cumsum(-1) - ranked) >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        return logits.log_softmax(-1)


@dataclass(frozen=True)
class ProposalStats:
    """Raw sums of one or more batches, to be added across batches and ranks before dividing. All float64.

    Line 0 belongs to greedy proposals. Where it was told how the rollouts sample, the next ones belong to the rest of
    ``DRAFT_TEMPERATURES``, and the last one to a perfect draft that proposes the policy's likeliest token.
    """

    accepted: Tensor  # [L, J] expected rounds whose first j + 1 drafted tokens are accepted
    rounds: Tensor  # [L] expected rounds
    entropy: Tensor  # [] sum over positions of the entropy of what was sampled from, nats; 0 where that was not told
    count: Tensor  # [] positions

    @classmethod
    def zeros(cls, steps: int, sampled: bool, device: torch.device | str = "cpu") -> ProposalStats:
        """Nothing measured yet of J = ``steps``, for sampled proposals, too, or greedy ones alone: neutral in addition."""
        lines = len(DRAFT_TEMPERATURES) + 1 if sampled else 1
        return cls.unpack(torch.zeros(lines * (steps + 1) + 2, dtype=torch.float64, device=device), steps)

    def pack(self) -> Tensor:
        """All sums in one vector [L * (J + 1) + 2], for one all-reduce."""
        return torch.cat([self.accepted.flatten(), self.rounds, self.entropy.reshape(1), self.count.reshape(1)])

    @classmethod
    def unpack(cls, vector: Tensor, steps: int) -> ProposalStats:
        """The sums in a vector that ``pack`` made, of J = ``steps``."""
        lines = (len(vector) - 2) // (steps + 1)
        accepted, rounds, rest = torch.split(vector, [lines * steps, lines, 2])
        return cls(accepted.view(lines, steps), rounds, *rest)

    def __add__(self, other: ProposalStats) -> ProposalStats:
        return ProposalStats.unpack(self.pack() + other.pack(), self.accepted.shape[1])

    def chances(self, draft_temperature: float) -> tuple[float, ...]:
        """[J] chance that each drafted token is accepted, given those before it; shorter where no chain came so far.

        Raises:
            ValueError: if this is none of ``DRAFT_TEMPERATURES``.
        """
        line = DRAFT_TEMPERATURES.index(draft_temperature)
        return self._chances_of(line) if line < len(self.rounds) else ()

    @property
    def ceiling(self) -> tuple[float, ...]:
        """[J] the same of a perfect draft with greedy proposals; (): not known. One that samples is always accepted."""
        return self._chances_of(-1) if len(self.rounds) > 1 else ()

    @property
    def mean_entropy(self) -> float:
        """Of the distribution that the rollouts sample from, nats a token; 0.0 where nothing was measured."""
        return float(self.entropy / self.count.clamp_min(1))

    def _chances_of(self, line: int) -> tuple[float, ...]:
        return conditional_acceptance(self.accepted[line].tolist(), float(self.rounds[line]))


@torch.no_grad()
def replay_proposals(
    draft: Draft,
    batch: PackedBatch,
    embed: Tensor,  # [V, H] the policy's input embedding
    lm_head: Tensor,  # [V, H] the policy's LM head
    *,
    steps: int,
    sampling: Sampled | None = None,
    cap: float | None = None,
) -> ProposalStats:
    """What a draft would have made of the batch's rollouts, by each way to propose tokens.

    A drafted token counts only if those before it were accepted, so logits are computed for the chains that go on: with greedy
    proposals about as many products with the head as tokens are accepted, and none of the target's.

    Args:
        draft: the model.
        batch: packed documents; for sampled proposals the policy that ``last`` and ``lm_head`` tell must have sampled them.
        embed: [V, H], any float dtype.
        lm_head: [V, H], the draft's head, too, unless its vocabulary is pruned.
        steps: J, the number of drafted tokens to unroll.
        sampling: of the rollouts; None: greedy proposals alone, whose replay asks nothing of the policy but its text.
        cap: of the target's logits, see ``outside.logit_cap``.
    """
    valid, total = batch.valid(steps), len(batch.rows)
    sampled = batch.input_ids[batch.rows + 1]
    chunk = max(1, chunk_elements_on(lm_head.device) // lm_head.shape[0])
    stats = ProposalStats.zeros(steps, sampling is not None, valid.device)
    ways = max(1, len(stats.rounds) - 1)
    chance = torch.zeros(len(stats.rounds), steps, total, device=valid.device)
    of_sampled, entropy = chance[0, 0], stats.entropy
    if sampling is not None:
        of_sampled, likeliest, entropy = _policy(batch, lm_head, valid[0], sampled, sampling, cap, chunk)
        chance[-1] = likeliest * valid
    head, ids = draft.head(lm_head)
    local = sampled if ids is None else _place_in(ids, sampled, lm_head.shape[0])
    reach = valid[0].to(chance.dtype).expand(ways, -1)  # of each chain, at the row that it has come to
    for j, state in enumerate(draft.states(batch, embed, steps)):
        alive = (valid[j] & (reach.amax(0) > _OVER)).nonzero().squeeze(1)
        if not len(alive):
            break
        for some in torch.split(alive, chunk):
            logits = (state[batch.rows[some] - 1 - j].to(head.dtype) @ head.T).float()
            chance[:ways, j, some] = _chance(logits, local[some], of_sampled[some], sampling)
        reach = F.pad((reach * chance[:ways, j])[:, : total - 1], (1, 0))
    accepted, rounds = expected_replay(chance, valid, batch.rows)
    return ProposalStats(accepted.to(valid.device), rounds.to(valid.device), entropy, valid[0].sum().double())


def _policy(
    batch: PackedBatch,
    lm_head: Tensor,
    wanted: Tensor,
    sampled: Tensor,
    sampling: Sampled,
    cap: float | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """[R] log-prob of the sampled token, [R] is it the likeliest one, [] summed entropy; only the wanted rows are looked at."""
    log_prob, likeliest = torch.zeros_like(wanted, dtype=torch.float32), torch.zeros_like(wanted)
    entropy = torch.zeros((), dtype=torch.float64, device=wanted.device)
    for some in torch.split(wanted.nonzero().squeeze(1), chunk):
        found = sampling.log_probs(target_logits(batch.last[batch.rows[some]], lm_head, cap))
        log_prob[some] = found.gather(-1, sampled[some, None]).squeeze(-1)
        likeliest[some] = found.argmax(-1) == sampled[some]
        entropy -= (found.exp() * found).nan_to_num_(0.0).sum(dtype=torch.float64)
    return log_prob, likeliest, entropy


def _chance(logits: Tensor, token: Tensor, log_prob: Tensor, sampling: Sampled | None) -> Tensor:
    """[S, C] with which each chain goes on: draft logits [C, Vd], the sampled tokens among them or -1, their log-probs [C]."""
    rows = [(logits.argmax(-1) == token).float()]
    if sampling is not None:
        top, inside = logits.amax(-1), token >= 0
        of_token = logits.gather(-1, token.clamp_min(0)[:, None]).squeeze(-1) - top
        for relative in DRAFT_TEMPERATURES[1:]:
            by = 1.0 / (relative * sampling.temperature)
            normaliser = ((logits - top[:, None]) * by).exp_().sum(-1).log_()
            rows.append((of_token * by - normaliser - log_prob).clamp_max(0.0).exp() * inside)
    return torch.stack(rows)


def _place_in(ids: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Where each of the tokens stands among the draft's ids [Vd], in whatever order these are; -1: nowhere."""
    place = ids.new_full((vocabulary,), -1)
    place[ids] = torch.arange(len(ids), device=ids.device)
    return place[tokens]


def expected_replay(chance: Tensor, valid: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Expected rounds and acceptances of a walk over recorded spans, in which each chain goes on by chance.

    Args:
        chance: [S, J, R] that step j's token at a teacher row is accepted, for S ways to draft.
        valid: [J, R] bool, aligned by teacher row.
        rows: [R] int64 teacher rows, ascending; a gap starts a new sampled span.

    Returns:
        accepted [S, J] and rounds [S], float64, on the CPU. With chances of 0 and 1 alone they are those of ``loss.replay``.
    """
    ways, steps, total = chance.shape
    accepted, rounds = np.zeros((ways, steps)), np.zeros(ways)
    if total:
        # anchor i's chain lies on the diagonal (j, i + j)
        going = torch.stack([shifted(line, -1) for line in chance]).double().cpu().numpy()
        reach = going.cumprod(axis=1)  # [S, J, R]
        ends = np.concatenate([np.ones((ways, 1, total)), reach], axis=1)
        ends[:, :-1] -= reach  # [S, J + 1, R] chance that exactly n drafted tokens are accepted
        whole = shifted(valid, -1).all(0).tolist()
        row = rows.cpu().numpy()
        begins = np.concatenate([[0], np.flatnonzero(np.diff(row) != 1) + 1, [total]])
        visited = np.zeros((ways, total + steps + 1))
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            visited[:, begin] = 1.0  # each walk comes by, however the span before it ended
            for i in range(begin, end):
                if whole[i]:
                    reached = min(i + steps + 1, end - 1)
                    visited[:, i + 1 : reached + 1] += visited[:, i, None] * ends[:, : reached - i, i]
        rounds = (visited[:, :total] * whole).sum(1)
        accepted = (visited[:, None, :total] * reach * np.array(whole)).sum(2)
    return torch.from_numpy(accepted), torch.from_numpy(rounds)
