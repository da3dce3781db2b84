"""What a position of a drafted chain is worth: as much as hangs on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def chain_weights(confidence: Tensor, valid: Tensor, smoothing: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): a position weighs as much as it bears of its chain's expected accepted tokens.

    Args:
        confidence: [J, R] in 0..1 that step j's token at a teacher row is accepted; aligned by teacher row, so that the chain of
            an anchor lies on a diagonal.
        valid: [J, R] bool.
        smoothing: share of certainty that is mixed into it, so that what follows a weak position still counts.

    Returns:
        [J, R]: for each anchor and position j, the sum over m >= j of the products of smoothed confidences up to m; 0 where
        not valid.
    """
    ok = shifted(valid.to(confidence.dtype), -1)  # column i holds the chain of anchor i
    smooth = torch.where(ok > 0, (1 - smoothing) * shifted(confidence, -1) + smoothing, torch.ones_like(ok))
    reach = smooth.cumprod(0) * ok
    return shifted(reach.flip(0).cumsum(0).flip(0) * ok, 1)


def shifted(table: Tensor, way: int) -> Tensor:
    """[J, R] with line j moved by ``way * j`` columns, zeros coming in."""
    total = table.shape[1]
    moved = []
    for j, line in enumerate(table):
        by = min(j, total)
        moved.append(F.pad(line[by:], (0, by)) if way < 0 else F.pad(line[: total - by], (by, 0)))
    return torch.stack(moved)
