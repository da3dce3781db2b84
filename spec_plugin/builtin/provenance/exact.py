"""What is exact about log-probs: finite, not above zero, and which policy version sampled each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, int64

from spec_plugin.errors import LogprobProvenanceError
from spec_plugin.events import LogprobBatch, StatedLogprobs

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
    first, last, now = batch.rollout_versions, batch.last_versions, batch.policy_version
    tokens = batch.token_versions if batch.lag_allowed else None
    too_new = "Nobody can have sampled with later weights"
    if tokens is not None:
        newest = tokens.masked_fill(~batch.mask, -1).amax(-1)
        _refuse_versions(newest > now, now, newest, newest, too_new)
    if first is None:
        return
    last = first if last is None else last
    known = first >= 0
    if not batch.lag_allowed:
        other = known & ((first != now) | (last != now))
        _refuse_versions(other, now, first, last, "This trainer was said to be synchronous")
        return
    _refuse_versions(known & ((last > now) | (last < first)), now, first, last, too_new)
    if tokens is not None:
        outside = (tokens >= 0) & batch.mask & ((tokens < first[:, None]) | (tokens > last[:, None]))
        reason = "The engine that sampled them says other versions than the trainer"
        _refuse_versions(known & outside.any(-1), now, first, last, reason)


def _refuse_versions(wrong: Tensor, now: int, first: Tensor, last: Tensor, reason: str) -> None:
    if not bool(wrong.any()):
        return
    rows = wrong.nonzero().flatten().tolist()
    spans = [(i, int(first[i]), int(last[i])) for i in rows[:_SHOWN]]
    shown = ", ".join(f"sequence {i} by version {a}" + (f" to {b}" if b != a else "") for i, a, b in spans)
    raise LogprobProvenanceError(
        f"{len(rows)} of {len(wrong)} sequences were not sampled by policy version {now}, which recomputed their "
        f"log-probs: {shown}. {reason}"
    )


def by_lag(batch: LogprobBatch) -> Iterator[tuple[int, LogprobBatch]]:
    """Split a batch by how many policy versions lie between sampling and recomputation of a token; 0 first.

    Steps that were trained since the last sync count as versions, too: the weights have moved.

    Where only the versions of a sequence's first and last token are known, the first one's counts; unknown counts as 1.
    """
    if not batch.lag_allowed or batch.rollout is None:
        yield int(batch.lag_allowed) + batch.ahead, batch
        return
    first = batch.rollout_versions
    versions = batch.mask.new_full((), -1, dtype=int64) if first is None else first[:, None]
    versions = versions.expand_as(batch.mask)
    if batch.token_versions is not None:
        versions = batch.token_versions.where(batch.token_versions >= 0, versions)
    lags = (batch.policy_version - versions).masked_fill(versions < 0, 1) + batch.ahead
    seen = lags[batch.mask]
    if not len(seen):
        return
    least = int(seen.min())
    counts = (seen - least).bincount()  # `unique` would sort a step's million tokens
    for lag in (counts.nonzero().flatten() + least).tolist():
        yield lag, replace(batch, mask=batch.mask & (lags == lag))
