"""Log-probs that the engine reports and the trainer has not asked for: they are kept aside, and verify what they can.

A trainer may be told to go without rollout log-probs. The samples must be verified all the same, so the engine is asked for
log-probs, keeps those of the last few requests of each phase, and the trainer sees none of them. The first actor rank finds
its own documents among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spec_plugin.api.events import LogprobBatch
from spec_plugin.api.spans import fingerprints

#: requests of a phase that each engine keeps
KEPT = 64


@dataclass(frozen=True, slots=True)
class Witness:
    """One request: a turn of a conversation is a prefix of the document that it became part of."""

    mark: int  # fingerprint of prompt and response
    until: int  # tokens of both
    stated: bytes  # log-probs of the response, which ends there: float64, in a form that is cheap to send

    @property
    def log_probs(self) -> Tensor:
        """Of the response, [n] float64."""
        return torch.from_numpy(np.frombuffer(self.stated, np.float64).copy())


def witnessed(
    batch: LogprobBatch, documents: Sequence[Tensor], starts: Sequence[int], witnesses: Iterable[Witness]
) -> LogprobBatch | None:
    """The part of a batch that witnesses know: their log-probs as ``rollout``, under a mask of their tokens; None if none.

    Args:
        batch: without rollout log-probs.
        documents: token ids of each whole sequence, [n_i].
        starts: where the first column of ``batch`` lies in each document.
        witnesses: of the same phase.
    """
    known = {(w.until, w.mark): w.log_probs for w in witnesses}
    lengths = np.array(sorted({length for length, _ in known}), np.int64)
    rollout, seen = batch.recomputed.clone(), torch.zeros_like(batch.mask)
    for row, (document, start) in enumerate(zip(documents, starts, strict=True)):
        ends = lengths[lengths <= len(document)]
        marks = fingerprints(document.cpu().numpy())[ends]
        for end, mark in zip(ends.tolist(), marks.tolist(), strict=True):
            said = known.get((end, mark))
            if said is not None and len(said) and end > start:  # else it is all of the prompt
                first = max(end - len(said), start)
                columns = slice(first - start, end - start)
                rollout[row, columns] = said[len(said) - (end - first) :].to(rollout.dtype)
                seen[row, columns] = True
    mask = batch.mask & seen
    rows = mask.any(-1)
    if not bool(rows.any()):
        return None
    return replace(batch, rollout=rollout, mask=mask).of(rows)
