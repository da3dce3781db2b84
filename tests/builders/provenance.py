"""A provenance guard, and batches whose differences are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulators.guard import heavy
from torch import Tensor

from builders.batches import batch_of, with_drafts
from spec_plugin import LogprobProvenanceError, SpecConfig
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo
from spec_plugin.policy.provenance import ProvenanceGuard

VERSION = 7


def guard(dtype: str = "float32", sampling: dict[str, float] | None = None, **options: object) -> ProvenanceGuard:
    out = ProvenanceGuard()
    target = TargetInfo(path="", hf_config={}, dtype=dtype, actor_dtype=dtype, sampling=sampling or {})
    out.spec_configure(SpecConfig.parse(options), target)
    return out


def refusal(batch: LogprobBatch, by: ProvenanceGuard | None = None) -> str:
    with pytest.raises(LogprobProvenanceError) as caught:
        (by or guard()).spec_check_logprobs(batch)
    return str(caught.value)


def plain(batch: LogprobBatch, version: int = VERSION - 1) -> LogprobBatch:
    """The same differences in a phase without drafts."""
    return replace(at(batch, version), drafted=with_drafts(batch.mask, Drafts.OFF))


def at(batch: LogprobBatch, version: int) -> LogprobBatch:
    """Sampled and recomputed by another version."""
    return replace(batch, policy_version=version, versions=torch.full(batch.mask.shape, version))


def heavy_tailed(generator: torch.Generator, sequences: int, tokens: int, mean: float = 0.02) -> Tensor:
    """Differences of a bfloat16 run: Student's t with 3 degrees of freedom, on a scale of each sequence's own."""
    return mean * heavy(generator, sequences, tokens)


def simulated(differences: Tensor, version: int, speculating: bool = True, plain: Tensor | None = None) -> LogprobBatch:
    recomputed = torch.full_like(differences, -500.0).double()
    batch = batch_of(version, recomputed, recomputed + differences, drafts=Drafts.ON if speculating else Drafts.OFF)
    return batch if plain is None else replace(batch, drafted=torch.where(plain, Drafts.CONTROL, batch.drafted))
