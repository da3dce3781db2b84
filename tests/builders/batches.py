"""Batches for the guards: all of one policy version, and all with drafts or all without; and what engines say of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from spec_plugin.api.events import Drafts, LogprobBatch, StatedLogprobs
from spec_plugin.api.spans import Span, Tokens, fingerprints, joined, weighed_as_carried


def batch_of(
    version: int,
    recomputed: Tensor,
    rollout: Tensor | None,
    mask: Tensor | None = None,
    drafts: Drafts = Drafts.ON,
    sampled_by: int | None = None,
) -> LogprobBatch:
    """Log-probs [B, T].

    Args:
        version: that recomputed them.
        recomputed: by the actor.
        rollout: by the engine.
        mask: None: all were sampled.
        drafts: of all tokens.
        sampled_by: policy version of all tokens; None: the one that recomputes.
    """
    mask = torch.ones_like(recomputed, dtype=torch.bool) if mask is None else mask
    versions = torch.full(mask.shape, version if sampled_by is None else sampled_by)
    return LogprobBatch(version, recomputed, rollout, mask, versions, with_drafts(mask, drafts), False)


def with_drafts(mask: Tensor, drafts: Drafts) -> Tensor:
    return torch.full(mask.shape, drafts, dtype=torch.uint8)


def stated_of(batch: LogprobBatch) -> StatedLogprobs:
    """The same log-probs, recomputed by nobody."""
    assert batch.rollout is not None
    return StatedLogprobs(batch.policy_version, batch.rollout, batch.mask, batch.versions, batch.drafted)


def whole_batch(rows: int, columns: int) -> LogprobBatch:
    """All were sampled, each with a log-prob of its own; of what the engine said nothing is known."""
    recomputed = -torch.arange(1.0, rows * columns + 1).view(rows, columns) / 100
    return batch_of(3, recomputed, None)


def span_of(
    prompt: Tokens,
    response: Tokens,
    version: int,
    plain: tuple[int, int] = (0, 0),
    log_probs: Sequence[float] | None = None,
) -> Span:
    """The span of a request that is complete.

    Args:
        prompt: token ids that it began with.
        response: token ids that it sampled.
        version: policy version that did.
        plain: its tokens from this one on, up to that one, counted from the document's first, were sampled without drafts.
        log_probs: of the response, where the trainer gets them: it does not get those of another request of the same text.
    """
    mark = int(fingerprints(joined(prompt, response))[-1])
    stated = None if log_probs is None else weighed_as_carried(log_probs, len(prompt))
    return Span(mark, len(prompt), len(prompt) + len(response), version, *plain, stated)


def kept_of(tokens: Sequence[int], log_probs: Sequence[float], version: int = 0) -> Span:
    """The span of a request whose log-probs the trainer did not ask for, by the tokens of prompt and response."""
    prompt, response = tokens[: len(tokens) - len(log_probs)], tokens[len(tokens) - len(log_probs) :]
    return replace(span_of(prompt, response, version), log_probs=np.asarray(log_probs, np.float64).tobytes())
