"""What is exact about log-probs: finite, not above zero, and which policy version sampled each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import UNKNOWN, LogprobBatch, StatedLogprobs, disputed

#: log p <= 0; two roundings of a token with p = 1 may land just above.
_ABOVE_ZERO = 1e-3
_SHOWN = 3
ADVICE = (
    "Training stopped before they entered the loss. `spec-plugin doctor` checks the engine; without the flag the run "
    "does not speculate"
)


def first_tokens(bad: Tensor, values: dict[str, Tensor]) -> str:
    """The first offending (sequence, position) pairs with every source's value there."""
    rows = bad.nonzero()[:_SHOWN].tolist()
    parts = [
        f"sequence {b} position {t} " + " ".join(f"{name}={v[b, t].item():.4f}" for name, v in values.items())
        for b, t in rows
    ]
    return "; ".join(parts)


def check_finite(name: str, values: Tensor, mask: Tensor) -> None:
    """Refuse NaN, infinities and log-probs above zero where ``mask`` is True.

    Args:
        name: whose log-probs these are, for the message.
        values: [B, T] float log-probs.
        mask: [B, T] bool.

    Raises:
        LogprobProvenanceError: naming the first sequences, positions and values.
    """
    bad = mask & ~(values.isfinite() & (values <= _ABOVE_ZERO))
    if bad.any():
        what = f"{int(bad.sum())} of {int(mask.sum())} {name} log-probs are not finite or above zero"
        raise LogprobProvenanceError(f"{what}: {first_tokens(bad, {name: values})}. {ADVICE}")


def check_versions(batch: LogprobBatch | StatedLogprobs) -> None:
    """Refuse sequences that another policy version sampled than the trainer may train on.

    Raises:
        LogprobProvenanceError: naming the sequences and the versions.
    """
    versions, now = batch.versions.masked_fill(~batch.mask, UNKNOWN), batch.policy_version
    if not batch.lag_allowed:
        _refuse_versions(
            (versions >= 0) & (versions != now),
            versions,
            now,
            "A synchronous trainer must recompute with the weights that sampled",
        )
    _refuse_versions(
        versions > now, versions, now, "A later version than the trainer's does not exist: the versions are mixed up"
    )
    _refuse_versions(
        versions < UNKNOWN, versions, now, "The engine that sampled them and the trainer name different versions"
    )


def check_origin(batch: LogprobBatch | StatedLogprobs, unsampled: bool) -> None:
    """Refuse rows that are not, token by token and log-prob by log-prob, what an engine of this run has answered.

    Args:
        batch: what engines know of it beside it.
        unsampled: may there be tokens that none has sampled.

    Raises:
        LogprobProvenanceError: naming the first sequences.
    """
    if batch.sampled is not None and not unsampled and bool((foreign := batch.mask & ~batch.sampled).any()):
        rows = foreign.any(-1).nonzero().flatten().tolist()
        where = ", ".join(f"sequence {i} from position {int(foreign[i].nonzero()[0])}" for i in rows[:_SHOWN])
        raise LogprobProvenanceError(
            f"{len(rows)} of {len(foreign)} sequences hold tokens that no engine of this run has sampled there: {where}. They "
            "were edited, cut, tokenised again or come from elsewhere. Where that is meant, set spec.unsampled_rows=allow"
        )
    if batch.apart is not None and len(rows := (batch.apart > 0).nonzero().flatten().tolist()):
        where = ", ".join(f"sequence {i} by {float(batch.apart[i]):.3g} nats" for i in rows[:_SHOWN])
        raise LogprobProvenanceError(
            f"the rollout log-probs of {len(rows)} of {len(batch.apart)} sequences are not those that the engine stated: their "
            f"sum, weighed by place, differs: {where}. They were exchanged, moved or replaced. {ADVICE}"
        )


def _refuse_versions(wrong: Tensor, versions: Tensor, now: int, reason: str) -> None:
    rows = wrong.any(-1).nonzero().flatten().tolist()
    if not rows:
        return
    said = versions.where(versions >= UNKNOWN, disputed(versions))
    spans = [(i, *said[i][said[i] >= 0].aminmax()) for i in rows[:_SHOWN]]
    shown = ", ".join(f"sequence {i} by version {int(a)}" + (f" to {int(b)}" if b != a else "") for i, a, b in spans)
    raise LogprobProvenanceError(
        f"{len(rows)} of {len(wrong)} sequences were not sampled by policy version {now}, which recomputed their "
        f"log-probs: {shown}. {reason}"
    )


def by_lag(batch: LogprobBatch) -> Iterator[tuple[int, LogprobBatch]]:
    """Split a batch by how many policy versions lie between sampling and recomputation of a token; 0 first.

    Steps that were trained since the last sync count as versions, too: the weights have moved.
    """
    if not batch.lag_allowed or batch.rollout is None:
        yield int(batch.lag_allowed) + batch.ahead, batch
        return
    versions, later = batch.versions, batch.policy_version + 1
    oldest = versions.masked_fill(versions < 0, later).amin(-1, keepdim=True)
    versions = versions.where(versions >= 0, oldest)
    lags = (batch.policy_version - versions).masked_fill(versions == later, 1) + batch.ahead
    seen = lags[batch.mask]
    if not len(seen):
        return
    least = int(seen.min())
    counts = (seen - least).bincount()  # `unique` would sort a step's million tokens
    for lag in (counts.nonzero().flatten() + least).tolist():
        yield lag, replace(batch, mask=batch.mask & (lags == lag))
