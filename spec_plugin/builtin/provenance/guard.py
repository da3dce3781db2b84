"""The provenance guard: every log-prob that enters the loss is finite, and the target's, at the recorded version (law 3).

Not finite, above zero, or of another policy version: the run stops at once. That the engine's log-probs are those of the
target is a matter of degree, and judged by what the run itself shows: plain requests, of phases without drafts and of the
control group (``spec.control_share``), say what two correct implementations of this model differ by
(``spec_plugin.builtin.provenance.reference``); ``spec_plugin.builtin.provenance.windows`` is how they are compared. Text of a phase without drafts
that is further off is warned of and counted, never a reason to stop (without the flag the run would be no better), and never
part of the measure: doubtful phases are left out. A run stops when drafted text

- is further off than three times (single tokens: ten times) the plain text of the last phases, at an error level of 1e-7 a
  batch and test, *and* the plain requests of its own phase do not show the same; or is ten times (thirty times) as far off,
  even though they do: such a jump is a wrong sync, not drift;
- is further off than correct runs ever were, where there was no plain text yet;
- or holds one sequence that is beyond anything that a correct run shows.

In asynchronous training tokens are judged by their lag, the policy versions between sampling and recomputation. Those without
one as above. Those with one when they are further off than three times (ten times) the plain text of their own step, by what
such ratios were in the last phases. Where their step has no plain text: than ten times (thirty times) that of other steps, and
0.2 nats a version (single tokens: 6). Where there is none at all: than 1 nat a version (30). Simulated runs with known truth
say how often this cries wolf and what it sees (``make guards``, docs/guards.md).
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, int64

from spec_plugin.builtin.provenance.windows import Spread, Windows, difference, median, spread, windows
from spec_plugin.builtin.provenance.reference import ENOUGH, Baseline, Excess
from spec_plugin.config import SpecConfig
from spec_plugin.errors import LogprobProvenanceError
from spec_plugin.events import LogprobBatch, StatedLogprobs, TargetInfo
from spec_plugin.hookspecs import hookimpl

logger = logging.getLogger(__name__)

#: tokens from which on a single sequence can be beyond anything
_LONG = 32
#: log p <= 0; two roundings of a token with p = 1 may land just above.
_ABOVE_ZERO = 1e-3
_SHOWN = 3


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
        raise LogprobProvenanceError(f"{what}: {_show(bad, {name: values})}. {_ADVICE}")


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


@dataclass(frozen=True)
class _Found:
    """What is wrong with a batch."""

    what: str
    value: float
    bound: float
    where: Tensor  # [B, T] bool

    @classmethod
    def of(cls, excess: Excess, mask: Tensor, diff: Tensor) -> _Found:
        """What the baseline says of differences [B, T] under a mask [B, T]."""
        return cls(excess.what, excess.value, excess.bound, mask & (diff > excess.bound))


_ADVICE = (
    "Training stopped before they entered the loss. `spec-plugin doctor` checks the engine; without the flag the run "
    "does not speculate"
)


def _show(bad: Tensor, values: dict[str, Tensor]) -> str:
    """The first offending (sequence, position) pairs with every source's value there."""
    rows = bad.nonzero()[:_SHOWN].tolist()
    parts = [
        f"sequence {b} position {t} " + " ".join(f"{name}={v[b, t].item():.4f}" for name, v in values.items())
        for b, t in rows
    ]
    return "; ".join(parts)


class ProvenanceGuard:
    """Checks each batch, and keeps what the run's own plain requests show."""

    def __init__(self) -> None:
        #: drafted text, too little of it to be judged, and the version that recomputed it, by lag
        self._waiting: dict[int, tuple[int, Windows]] = {}
        self._rng = random.Random(0)
        self._comparable = True
        self._last: Spread | None = None
        self._lag = 0.0  # mean, of the last batch's tokens
        self._versions_known = 0.0
        self.refused: LogprobProvenanceError | None = None  # in the last batch
        self._coarse = False  # was it said that plain text is coarser than its dtype
        self._alarms = 0
        self._alarmed: int | None = None  # the last policy version whose plain text raised one

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo) -> None:
        """Remember the dtypes; truncated sampling makes the engine's log-probs renormalised, hence not comparable."""
        self._config, self._target = config, target
        self._comparable = not target.truncated
        self._baseline = Baseline(target)

    @hookimpl
    def spec_check_stated(self, batch: StatedLogprobs) -> None:
        """Finite and right version; what cannot be compared here is compared on a sample.

        Raises:
            LogprobProvenanceError: on the first violation.
        """
        with self._refusing():
            check_finite("rollout", batch.rollout, batch.mask)
            check_versions(batch)

    @hookimpl
    def spec_check_logprobs(self, batch: LogprobBatch) -> None:
        """Finite, right version, and confirmed by the recomputation.

        Raises:
            LogprobProvenanceError: on the first violation.
        """
        with self._refusing():
            self._judge(batch)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Keep what was refused: the session asks for it, whatever a plugin around this one has made of the exception."""
        self.refused = None
        try:
            yield
        except LogprobProvenanceError as error:
            self.refused = error
            raise

    def _judge(self, batch: LogprobBatch) -> None:
        check_finite("recomputed", batch.recomputed, batch.mask)
        check_versions(batch)
        versions = batch.rollout_versions
        self._versions_known = 0.0 if versions is None else float((versions >= 0).double().mean())
        if batch.rollout is None:
            return
        check_finite("rollout", batch.rollout, batch.mask)
        if self._comparable:
            diff = difference(batch.recomputed, batch.rollout, batch.mask)
            self._last = spread(diff, batch.mask, self._baseline.far)
            parts = list(by_lag(batch))
            tokens = sum(int(part.mask.sum()) for _, part in parts)
            self._lag = sum(lag * int(part.mask.sum()) for lag, part in parts) / max(1, tokens)
            for lag, part in parts:
                self._check(part, lag)
        elif batch.rollout_in_loss:
            raise LogprobProvenanceError(
                f"rollout log-probs enter the loss, but with top_p={self._target.sampling.get('top_p')}, "
                f"top_k={self._target.sampling.get('top_k')} they are those of the truncated distribution and cannot be "
                "verified against the actor's; set top_p=1.0 and top_k=-1, or turn bypass_mode, rollout_is and rollout_rs off"
            )

    def _check(self, batch: LogprobBatch, lag: int) -> None:
        """One part of a batch, all of it sampled so many versions ago."""
        assert batch.rollout is not None
        diff = difference(batch.recomputed, batch.rollout, batch.mask)
        plain = batch.mask if not batch.speculating else batch.mask & _plain(batch)
        drafted = batch.mask & ~plain
        shown = windows(diff, plain, self._rng)
        version = batch.policy_version
        found = self._wrong(diff, drafted, self._baseline.control(shown, version, lag), lag, version)
        if found is not None:
            raise LogprobProvenanceError(f"{_described(found, batch)}. {_ADVICE}")
        self._learn(batch, lag, diff, plain, shown)

    def _learn(self, batch: LogprobBatch, lag: int, diff: Tensor, plain: Tensor, shown: Windows) -> None:
        """Keep what plain text shows; a phase without drafts that looks wrong raises an alarm, and is no measure of others."""
        excess = self._baseline.remember(batch.policy_version, lag, shown, batch.speculating)
        found = None if excess is None else _Found.of(excess, plain, diff)
        if self._config.logprob_tolerance is not None:
            found = None if batch.speculating else self._over_fixed(diff, plain)
        if found is not None:
            self._warn(found, batch)
        if not self._coarse and (shown_by := self._baseline.coarse) is not None:
            self._coarse = True
            logger.warning(
                "spec-plugin: engine and actor are both float32, and differ by %.1e nats a token on plain text, drafts or none: "
                "rounding to float32 explains 1e-4 at most. The likely cause is a weight sync that goes through bfloat16 (a "
                "bucket, an adapter merged in bfloat16), so that the engine samples from a slightly other policy; or matrix "
                "multiplications in TF32. The run goes on, as it would without the flag",
                shown_by,
            )

    def _wrong(self, diff: Tensor, drafted: Tensor, control: Windows, lag: int, version: int) -> _Found | None:
        if self._config.logprob_tolerance is not None:
            return self._over_fixed(diff, drafted)
        beyond = self._beyond(diff, drafted, lag)
        if beyond is not None:
            return beyond
        before, waiting = self._waiting.get(lag, (version, Windows()))
        if lag and before != version:  # the policy has moved by another step since
            waiting = Windows()
        waiting += windows(diff, drafted, self._rng)
        enough = len(waiting) >= ENOUGH
        self._waiting[lag] = (version, Windows() if enough else waiting)
        return self._too_far(diff, drafted, waiting, control, lag) if enough else None

    def _over_fixed(self, diff: Tensor, mask: Tensor) -> _Found | None:
        """The user's own bound on the mean."""
        bound = self._config.logprob_tolerance
        assert bound is not None
        mean = spread(diff, mask, math.inf).mean
        return _Found("the mean difference of the batch", mean, bound, mask & (diff > bound)) if mean > bound else None

    def _too_far(self, diff: Tensor, mask: Tensor, found: Windows, control: Windows, lag: int) -> _Found | None:
        """Too many windows further off than plain text is."""
        excess = self._baseline.too_far(found, control, lag)
        return None if excess is None else _Found.of(excess, mask, diff)

    def _beyond(self, diff: Tensor, mask: Tensor, lag: int) -> _Found | None:
        """A single sequence, far beyond anything that was ever seen."""
        lengths = mask.sum(-1)
        means = diff.masked_fill(~mask, 0.0).sum(-1) / lengths.clamp_min(1)
        long = lengths >= _LONG
        bound = self._baseline.beyond(lag, means[long].tolist())
        rows = long & (means > bound)
        if not bool(rows.any()):
            return None
        return _Found("the mean difference of a sequence", float(means[rows].max()), bound, mask & rows[:, None])

    def _warn(self, found: _Found, batch: LogprobBatch) -> None:
        """Once for each phase."""
        if batch.policy_version == self._alarmed:
            return
        self._alarms, self._alarmed = self._alarms + 1, batch.policy_version
        logger.warning(
            "spec-plugin: without drafts, too, %s. The run goes on, as it would without the flag; what this phase showed is no "
            "measure of the next ones (alarm %d, see spec/logprob_alarms)",
            *(_described(found, batch), self._alarms),
        )

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Differences of the last batch, what plain text shows, and from where on a window counts against the run."""
        if self._last is None:
            return {}
        past = self._baseline.past(0)
        out = {
            "spec/logprob_diff_mean": self._last.mean,
            "spec/logprob_diff_p9999": self._last.most,
            "spec/logprob_diff_max": self._last.max,
            "spec/logprob_far": self._last.far,
            "spec/logprob_tolerance": self._config.logprob_tolerance or self._baseline.tolerance,
            "spec/logprob_alarms": float(self._alarms),
            "spec/versions_known": self._versions_known,
            "spec/policy_lag": self._lag,
        }
        return out | ({"spec/logprob_diff_plain": median(past.means)} if len(past) else {})

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """What plain requests showed: a resumed run may begin with drafts."""
        path.mkdir(parents=True, exist_ok=True)
        partial = path / "provenance.json.partial"
        partial.write_text(json.dumps({"of": self._baseline.kind, "phases": self._baseline.state()}))
        os.replace(partial, path / "provenance.json")

    @hookimpl
    def spec_load(self, path: Path) -> None:
        """What they showed before, if dtypes and temperature are still the same."""
        file = path / "provenance.json"
        if not file.exists():
            return
        found = json.loads(file.read_text())
        if found["of"] == self._baseline.kind:
            self._baseline.restore(found["phases"])


def _plain(batch: LogprobBatch) -> Tensor:
    """[B, T] bool: tokens of a phase with drafts that were sampled without any."""
    plain = batch.plain
    return batch.mask.new_zeros(batch.mask.shape) if plain is None else plain


def _described(found: _Found, batch: LogprobBatch) -> str:
    assert batch.rollout is not None
    values = {"rollout": batch.rollout, "recomputed": batch.recomputed}
    state = "on" if batch.speculating else "off"
    return (
        f"rollout log-probs are not the target's at policy version {batch.policy_version}: {found.what} is beyond "
        f"{found.bound:.3g} nats (there {found.value:.3g}; speculation was {state}): {_show(found.where, values)}"
    )
