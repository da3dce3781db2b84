"""How far two sources of the same log-probs are apart: by token, and in windows of responses.

Engine and actor compute one model with different kernels and batch shapes: their log-probs differ by rounding, and how much
depends on model, dtype, temperature, kernels and text. Differences of bfloat16 models have heavy tails (single tokens are nats
off) and those of one sequence hang together, so neither a token nor one sequence is evidence. The unit is a *window* of a
response, one of each sequence where there are enough, with the mean and the largest difference in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_plugin.policy.provenance.rules import Statistic

#: windows of a batch that are looked at: two of each sequence where there are no more sequences than half of that, else one
WINDOWS = 32
#: tokens of a window
LONGEST, SHORTEST = 64, 8


@dataclass(frozen=True)
class Windows:
    """Differences |a - b| in windows of responses, in nats."""

    means: tuple[float, ...] = ()
    maxima: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.means)

    def __add__(self, other: Windows) -> Windows:
        return Windows(self.means + other.means, self.maxima + other.maxima)

    def of(self, statistic: Statistic) -> tuple[float, ...]:
        """Nats, one value for each window."""
        return self.means if statistic == "mean" else self.maxima


def difference(recomputed: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """|rollout - recomputed| under the mask, else zero, [B, T]: a product would keep NaN from padding."""
    return (rollout - recomputed).abs().masked_fill(~mask, 0.0)


def sequence_means(diff: Tensor, mask: Tensor, shortest: int) -> dict[int, float]:
    """Mean difference of each sequence with at least so many tokens under the mask, by its row in [B, T]."""
    lengths = mask.sum(-1)
    means = diff.masked_fill(~mask, 0.0).sum(-1) / lengths.clamp_min(1)
    rows = (lengths >= shortest).nonzero().flatten()
    return dict(zip(rows.tolist(), means[rows].tolist(), strict=True))


def difference_metrics(diff: Tensor, mask: Tensor, far: float) -> dict[str, float]:
    """What a run logs of differences [B, T] under a mask [B, T]; 0 of no tokens.

    Args:
        diff: nats.
        mask: bool.
        far: nats from which on a token is far off.
    """
    values = diff[mask] if bool(mask.any()) else diff.new_zeros(1)
    return {
        "spec/logprob_diff_mean": float(values.double().mean()),
        "spec/logprob_diff_p9999": float(values.kthvalue(math.ceil(0.9999 * len(values))).values),
        "spec/logprob_diff_max": float(values.max()),
        "spec/logprob_far": float((values > far).double().mean()),
    }


def windows(diff: Tensor, mask: Tensor, rng: random.Random) -> Windows:
    """Windows of the responses of a batch.

    Each sequence gives one, at random, or two where there are few: what a single odd text does must not count often.
    Responses shorter than a window are put together, in their order, until they make one; a rest says nothing.

    Args:
        diff: [B, T] differences.
        mask: [B, T] bool, True at tokens that count.
        rng: places the windows.
    """
    rows = [row[keep] for row, keep in zip(diff, mask, strict=True)]
    rows = _joined([row for row in rows if len(row)])
    each = 2 if len(rows) <= WINDOWS // 2 else 1
    pieces = [piece for row in rows for piece in _pieces(row, each, rng)]
    return Windows(tuple(float(p.double().mean()) for p in pieces), tuple(float(p.max()) for p in pieces))


def _joined(rows: Sequence[Tensor]) -> list[Tensor]:
    out, short = [], []
    for row in rows:
        if len(row) >= SHORTEST:
            out.append(row)
            continue
        short.append(row)
        if sum(map(len, short)) >= SHORTEST:
            out.append(torch.cat(short))
            short = []
    return out


def _pieces(row: Tensor, most: int, rng: random.Random) -> Iterator[Tensor]:
    count = max(1, min(most, len(row) // SHORTEST))
    room = len(row) // count
    size = min(room, LONGEST)
    for i in range(count):
        start = i * room + rng.randrange(room - size + 1)
        yield row[start : start + size]


def median(values: Sequence[float]) -> float:
    """The lower of the two middle values where their number is even; 0.0 of an empty sequence."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
