"""A few wrong rows in each batch: evidence that adds up over phases, as the capital of somebody who bets that there are some.

A tenth of a batch may be as odd as it likes, and one odd row proves nothing: rounding has heavy tails, and what is odd about a
prompt is odd in all of its responses. But rounding has no direction. A row's differences d = rollout - recomputed, cut off at a
few times what is usual in the batch, give c; with g_t a sign that is known without d, S = |sum g c| / sqrt(sum (g c)^2) is no
larger than a normal variable's absolute as long as the signs of d are those of coins (Efron 1969). *Drift* has g = 1 and sees
what is too high or too low. *Tilt* has g by whether the token was likelier than the row's mean, and sees another temperature,
another row's or another place's log-probs, and none at all. A row is *far off* if S is large beside the median row's.

Null: of the drafted rows of a batch no larger share is far off, on average, than ``chance``; whatever rows of one batch have to
do with each other. A bet on the share multiplies a capital by 1 - b + b * share / chance, at most 1 on average then, and each
batch a unit is added (an e-detector: Shin, Ramdas, Rinaldo 2022). So a correct run reaches 1 / ``ERROR_LEVEL`` within n batches
with a chance of at most n * ``ERROR_LEVEL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_plugin.policy.provenance import rules
from spec_plugin.policy.provenance.reference import Refusal
from spec_plugin.policy.provenance.rules import Precision


def row_scores(recomputed: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean |d|, drift and tilt of each row that is long enough, [3, n], and which rows those are, [n].

    Args:
        recomputed: [B, T] log-probs by the actor, nats.
        rollout: [B, T] by the engine.
        mask: [B, T] bool, the tokens that count.
    """
    rows = (mask.sum(-1) >= rules.SEQUENCE_TOKENS).nonzero().flatten()
    counts, own = mask[rows], recomputed[rows].masked_fill(~mask[rows], 0.0)
    tokens = counts.sum(-1, keepdim=True)
    d = (rollout[rows] - recomputed[rows]).masked_fill(~counts, 0.0)
    size = d.abs().sum(-1, keepdim=True) / tokens
    cut = rules.ROWS_CUT * (size.median() if len(rows) else size.sum())
    likelier = ((own > own.sum(-1, keepdim=True) / tokens) & counts).to(d.dtype)
    c, side = d.clamp(-cut, cut), likelier - likelier.sum(-1, keepdim=True) / tokens
    found = [x.sum(-1).abs() / x.square().sum(-1).sqrt().clamp_min(rules.SMALLEST) for x in (c, c * side)]
    return torch.stack([size.squeeze(-1), *found]).double(), rows


class RowEvidence:
    """The capital of a run, and how many rows of its plain text are far off: those are not the drafts' fault."""

    def __init__(self, precision: Precision) -> None:
        self._floor = rules.ROUNDING_FLOOR.of("mean", precision, 0)
        self._capital = torch.zeros(2, dtype=torch.float64)  # of drift, of tilt
        self._plain, self._plain_far = 0, torch.zeros(2, dtype=torch.float64)
        self._waiting = torch.zeros(3, 0, dtype=torch.float64)  # drafted rows, too few to have a median

    @property
    def chance(self) -> Tensor:
        """Share of the drafted rows that may be far off in a correct run, by drift and by tilt, [2]."""
        seen = (self._plain_far + 1) / (self._plain + rules.ROWS_PRIOR)
        return (rules.ROWS_TIMES * seen).clamp_min(rules.ROWS_CHANCE)

    @property
    def capital(self) -> float:
        """Of both bets, their mean: what in a correct run is on average no more than the number of batches."""
        return float(self._capital.mean())

    def learn(self, recomputed: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Rows of a phase without drafts, as in ``row_scores``."""
        scores, rows = row_scores(recomputed, rollout, mask)
        if len(rows) >= rules.ROWS:
            self._plain += len(rows)
            self._plain_far += self._far(scores).sum(-1)

    def judge(self, recomputed: Tensor, rollout: Tensor, drafted: Tensor) -> Refusal | None:
        """One more bet, on the drafted rows of a batch, as in ``row_scores``; too few wait for those of the next one."""
        scores, rows = row_scores(recomputed, rollout, drafted)
        scores = torch.cat([self._waiting, scores], 1)
        count = scores.shape[1]
        self._waiting = scores if count < rules.ROWS else scores[:, :0]
        if count < rules.ROWS or self._plain < rules.ROWS_KNOWN:
            return None
        far = self._far(scores)
        share = far.double().mean(-1)
        self._capital = (self._capital + 1.0) * (1.0 - rules.ROWS_BET + rules.ROWS_BET * share / self.chance)
        if self.capital < 1.0 / rules.ERROR_LEVEL:
            return None
        found = far[int(self._capital.argmax())]
        what = f"a direction of the differences in {int(found.sum())} of {count} sequences, as in batches before: their mean"
        value, usual = (float(scores[0, of].median()) for of in (found, slice(None)))
        return Refusal(what, value, usual, tuple(rows[found[count - len(rows) :]].tolist()))

    def _far(self, scores: Tensor) -> Tensor:
        """Which rows are far off by drift and by tilt, [2, n] bool, of ``row_scores``."""
        size, found = scores[0], scores[1:]
        bound = (rules.ROWS_FACTOR * found.median(-1, keepdim=True).values).clamp_min(rules.ROWS_COIN)
        return (found > bound) & (size > self._floor)

    def state(self) -> dict[str, Any]:
        """For JSON; ``restore`` takes it."""
        return {"capital": self._capital.tolist(), "plain": self._plain, "far": self._plain_far.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What ``state`` returned."""
        self._plain = int(state["plain"])
        self._capital, self._plain_far = (torch.tensor(state[name], dtype=torch.float64) for name in ("capital", "far"))
