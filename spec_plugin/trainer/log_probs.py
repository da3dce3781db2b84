"""What is known of log-probs that are about to enter the loss: which policy version sampled each token with which drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_plugin.api.events import UNKNOWN, Drafts, LogprobBatch, disputed
from spec_plugin.api.spans import Span, Spans, fingerprints
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.session import SpecSession


@dataclass(frozen=True)
class Responses:
    """What a trainer holds of B responses when their log-probs are about to enter the loss, padded to the longest."""

    documents: Sequence[Tensor]  # token ids of each whole sequence, [n_i] int64
    starts: Sequence[int]  # where the first column of the [B, T] tensors lies in each document
    mask: Tensor  # [B, T] bool, True where the policy sampled the token
    rollout: (
        Tensor | None
    )  # [B, T] float, log-probs by the engine while sampling; None: the trainer did not ask for them
    #: [B] int64 each: policy versions that sampled each first and last token, -1 unknown, where the trainer keeps them beside
    #: its responses; None: the engines alone say it
    told: tuple[Tensor, Tensor] | None = None
    #: [B] bool: rows from which the trainer has cut tokens on purpose, so that no request need be whole in them; None: from none
    cut: Tensor | None = None

    def versions(self, engine_versions: Tensor, current_version: int, allow_stale: bool) -> Tensor:
        """Each token's policy version, [B, T], as ``LogprobBatch`` has it, from what the trainer was told and what engines said.

        Args:
            engine_versions: [B, T] by the engines, -1 unknown.
            current_version: that recomputes.
            allow_stale: may a sequence be of several versions: then engines know better which token is of which.
        """
        if self.told is None:
            return engine_versions
        first, last = (version.to(engine_versions.device)[:, None] for version in self.told)
        number, count = self.mask.cumsum(-1), self.mask.sum(-1, keepdim=True)  # which sampled token of how many
        begun = torch.where((count == 1) & (last > current_version), last, first)  # a single token is both ends
        told = torch.where(first == last, first, UNKNOWN).expand_as(engine_versions)
        told = told.where(number != count, last).where(number != 1, begun)
        told = told.where(last >= first, disputed(first))  # versions never fall
        if not allow_stale:
            return told.where(told != UNKNOWN, engine_versions)
        between = (first < 0) | ((first <= engine_versions) & (engine_versions <= last))
        agreed = engine_versions.where(between, disputed(engine_versions))
        return told.where((engine_versions < 0) | (last > current_version), agreed)


def who_sampled(
    session: SpecSession, responses: Responses, spans: Spans, current_version: int, allow_stale: bool
) -> dict[str, Any]:
    """What engines have said of each token: the fields ``versions``, ``drafted``, ``sampled`` and ``apart`` of a batch.

    Args:
        session: of this process; it knows whether the engines draft in the phase.
        responses: B of them.
        spans: what the engines have said.
        current_version: policy version that recomputes; -1: not known yet, and then nothing can be compared.
        allow_stale: may sequences be older than that.
    """
    mask, told = responses.mask, responses.told
    versions, plain = torch.full(mask.shape, UNKNOWN), torch.zeros(mask.shape, dtype=torch.bool)
    exact: dict[str, Tensor] = {}
    if told is None and not allow_stale:  # what this phase has sampled is not taken for older text
        told = (torch.full((len(mask),), current_version),) * 2
    # log-probs are judged without it, too
    with session.guarded(Reason.ENGINES, "what the engines say of their samples"):
        found = spans.of(responses.documents, responses.starts, mask, told, responses.rollout)
        versions, plain, exact["apart"] = found.versions, found.plain, found.apart
        if spans.complete and not allow_stale:  # a document that lags may have begun before this run
            cut = torch.zeros(len(mask), dtype=torch.bool) if responses.cut is None else responses.cut.cpu()
            exact["sampled"] = (found.sampled | cut[:, None]).to(mask.device)
    if current_version < 0:
        versions.fill_(UNKNOWN)
    plain = plain.to(mask.device)
    drafts = bool((mask & ~plain).any()) if allow_stale else session.speculating  # in the phases that sampled it
    drafted = torch.where(plain & drafts, Drafts.CONTROL, Drafts.ON if drafts else Drafts.OFF).to(torch.uint8)
    versions = responses.versions(versions.to(mask.device), current_version, allow_stale)
    return {"versions": versions, "drafted": drafted, **exact}


def with_kept_log_probs(batch: LogprobBatch, responses: Responses, spans: Iterable[Span]) -> LogprobBatch | None:
    """The rows of a batch whose log-probs the engines kept, as its ``rollout``, under a mask of their tokens; None if none.

    Args:
        batch: without rollout log-probs, since the trainer did not ask for them.
        responses: that it was made of.
        spans: some of which have ``log_probs``; of several of one text the last one counts.
    """
    known = {(span.until, span.mark): (span.first, span.log_probs) for span in spans if span.log_probs is not None}
    lengths = np.array(sorted({length for length, _ in known}), np.int64)
    rollout, seen = batch.recomputed.clone(), torch.zeros_like(batch.mask)
    for row, (document, start) in enumerate(zip(responses.documents, responses.starts, strict=True)):
        ends = lengths[lengths <= len(document)]
        marks = fingerprints(document.cpu().numpy())[ends]
        for end, mark in zip(ends.tolist(), marks.tolist(), strict=True):
            if (end, mark) not in known or end <= start:  # what ends there is all prompt
                continue
            begins, log_probs = known[end, mark]
            first, values = max(begins, start), torch.from_numpy(np.frombuffer(log_probs, np.float64).copy())
            rollout[row, first - start : end - start] = values[first - begins :].to(rollout.dtype)
            seen[row, first - start : end - start] = True
    mask = batch.mask & seen
    rows = mask.any(-1)
    return replace(batch, rollout=rollout, mask=mask).of(rows) if bool(rows.any()) else None
