"""The provenance guard: every log-prob that enters the loss is finite, and the target's, at the recorded version (law 3).

Not finite, above zero, or of another policy version: the run stops at once. That the engine's log-probs are those of the
target is a matter of degree, and judged by what the run itself shows: plain requests, of phases without drafts and of the
control group (``spec.control_share``), say what two correct implementations of this model differ by;
``spec_plugin.builtin.agreement`` is how they are compared. What was not drafted is recorded and warned of, never a reason to
stop: without the flag the run would be no better. A run stops when drafted text

- is further off than three times (single tokens: ten times) the plain text of the last phases, at an error level of 1e-7 a
  batch and test, *and* the plain requests of its own phase do not show the same; or is ten times (thirty times) as far off,
  even though they do: such a jump is a wrong sync, not drift;
- is further off than correct runs ever were, where there was no plain text yet;
- or holds one sequence that is beyond anything that a correct run shows.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from spec_plugin.builtin.agreement import (
    Spread,
    Verdict,
    Windows,
    compared,
    difference,
    judged,
    median,
    spread,
    windows,
)
from spec_plugin.config import SpecConfig
from spec_plugin.errors import LogprobProvenanceError
from spec_plugin.events import LogprobBatch, TargetInfo
from spec_plugin.hookspecs import hookimpl

logger = logging.getLogger(__name__)

#: chance that a batch of a correct run is refused, for each of the two statistics
ERROR_LEVEL = 1e-7
#: windows below which there is no evidence: of plain text, and of drafted text (they wait for those of the next batch)
ENOUGH = 16
#: phases with plain text that the run's own baseline reaches back, and windows that are kept of each
PHASES, KEPT = 16, 256
#: windows of the control group from which on it has a say, and versions that it may be old
_CONTROL, _RECENT = 4, 16
#: tokens from which on a single sequence can be beyond anything
_LONG = 32
#: log p <= 0; two roundings of a token with p = 1 may land just above.
_ABOVE_ZERO = 1e-3
#: Asynchronous training: each policy version between sampling and recomputation may add this multiple of what two correct
#: implementations show (0.3 nats a version in bfloat16). Log-probs of another model are further away than that.
_LAG_FACTOR = 10.0
_SHOWN = 3


@dataclass(frozen=True)
class Bounds:
    """For one statistic of a window, in nats: what is said of it where, and where not, the run has a baseline."""

    least: float  # never more than rounding
    most: float  # no correct run shows more, in most of its windows
    factor: float = 1.0  # of the baseline: honest differences between plain and verifying steps
    jump: float = 1.0  # of the baseline: no drift between two phases


#: By the coarser of the two dtypes, at temperature 1. Measured on real runs: float32 means of 5e-7 to 1e-4 (the largest token
#: 20 times as far off), bfloat16 means of 5e-3 to 2e-2 and single tokens beyond 1; published bfloat16 means up to 4e-2.
_MEANS = {
    "float32": Bounds(1e-5, 2e-3, 3.0, 10.0),
    "float16": Bounds(5e-4, 3e-2, 3.0, 10.0),
    "bfloat16": Bounds(3e-3, 0.1, 3.0, 10.0),
}
_MAXIMA = {
    "float32": Bounds(3e-4, 0.05, 10.0, 30.0),
    "float16": Bounds(1e-2, 1.0, 10.0, 30.0),
    "bfloat16": Bounds(0.1, 3.0, 10.0, 30.0),
}
_COARSENESS = ("float32", "float16", "bfloat16")
#: a single sequence is beyond anything at this multiple of ``most``, and of the largest plain window
_BEYOND, _BEYOND_PLAIN = 15.0, 30.0


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


def check_versions(batch: LogprobBatch) -> None:
    """Refuse sequences that another policy version sampled than the one that recomputed them.

    Raises:
        LogprobProvenanceError: naming the sequences and both versions.
    """
    if batch.rollout_versions is None:
        return
    other = batch.rollout_versions > batch.policy_version if batch.lag_allowed else _lagging(batch)
    wrong = other & (batch.rollout_versions >= 0)
    if wrong.any():
        rows = wrong.nonzero().flatten().tolist()
        shown = ", ".join(f"sequence {i} by version {int(batch.rollout_versions[i])}" for i in rows[:_SHOWN])
        raise LogprobProvenanceError(
            f"{len(rows)} of {len(wrong)} sequences were not sampled by policy version {batch.policy_version}, which "
            f"recomputed their log-probs: {shown}. This trainer was said to be synchronous"
        )


def _lagging(batch: LogprobBatch) -> Tensor:
    """[B] bool: sequences that another policy version sampled than the one that recomputed them."""
    assert batch.rollout_versions is not None
    return batch.rollout_versions != batch.policy_version


def by_version(batch: LogprobBatch) -> Iterator[tuple[int, LogprobBatch]]:
    """Split a batch by how many policy versions lie between sampling and recomputation; 0 first, unknown counts as 1."""
    if not batch.lag_allowed or batch.rollout_versions is None or batch.rollout is None:
        yield int(batch.lag_allowed), batch
        return
    unknown = batch.rollout_versions < 0
    lags = (batch.policy_version - batch.rollout_versions).masked_fill(unknown, 1)
    for lag in sorted(set(lags.tolist())):
        yield int(lag), batch.of(lags == lag)


@dataclass(frozen=True)
class _Phase:
    """Plain text of one phase."""

    version: int
    plain: Windows
    drafted: bool  # is it the control group's


@dataclass(frozen=True)
class _Found:
    """What is wrong with a batch."""

    what: str
    value: float
    bound: float
    where: Tensor  # [B, T] bool


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
        self._history: deque[_Phase] = deque(maxlen=PHASES)
        self._waiting = Windows()  # of drafted text, too few to be judged
        self._rng = random.Random(0)
        self._comparable = True
        self._last: Spread | None = None
        self._versions_known = 0.0
        self._alarms = 0

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo) -> None:
        """Remember the dtypes; truncated sampling makes the engine's log-probs renormalised, hence not comparable."""
        self._config, self._target = config, target
        self._comparable = not target.truncated
        coarser = max(target.dtype, target.actor_dtype, key=_COARSENESS.index)
        temperature = float(target.sampling.get("temperature", 1.0)) or 1.0
        self._scale = 1.0 / temperature  # differences of logits are divided by it
        self._bounds = {"mean": _MEANS[coarser], "largest": _MAXIMA[coarser]}
        self._far = _MAXIMA[coarser].most * self._scale

    @hookimpl
    def spec_check_logprobs(self, batch: LogprobBatch) -> None:
        """Finite, right version, and confirmed by the recomputation.

        Raises:
            LogprobProvenanceError: on the first violation.
        """
        check_finite("recomputed", batch.recomputed, batch.mask)
        check_versions(batch)
        versions = batch.rollout_versions
        self._versions_known = 0.0 if versions is None else float((versions >= 0).double().mean())
        if batch.rollout is None:
            return
        check_finite("rollout", batch.rollout, batch.mask)
        if self._comparable:
            self._last = spread(difference(batch.recomputed, batch.rollout, batch.mask), batch.mask, self._far)
            for lag, part in by_version(batch):
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
        found = self._wrong(diff, drafted, self._control(shown, batch.policy_version), lag)
        if found is not None:
            raise LogprobProvenanceError(f"{_described(found, batch)}. {_ADVICE}")
        if not batch.speculating:
            fixed = self._config.logprob_tolerance is not None
            found = self._over_fixed(diff, plain) if fixed else self._too_far(diff, plain, shown, Windows(), lag)
            if found is not None:
                self._warn(found, batch)
        if lag == 0 and len(shown):
            self._remember(_Phase(batch.policy_version, shown, batch.speculating))

    def _control(self, now: Windows, version: int) -> Windows:
        """What the control group shows in this phase; where its requests are too few, with those of the phases before."""
        for phase in reversed(self._history):
            if len(now) >= _CONTROL or phase.version < version - _RECENT:
                break
            now += phase.plain if phase.drafted else Windows()
        return now

    @property
    def _past(self) -> Windows:
        return sum((phase.plain for phase in self._history), Windows())

    def _wrong(self, diff: Tensor, drafted: Tensor, control: Windows, lag: int) -> _Found | None:
        if self._config.logprob_tolerance is not None:
            return self._over_fixed(diff, drafted)
        beyond = self._beyond(diff, drafted, lag)
        if beyond is not None:
            return beyond
        self._waiting += windows(diff, drafted, self._rng)
        if len(self._waiting) < ENOUGH:
            return None
        judged_now, self._waiting = self._waiting, Windows()
        return self._too_far(diff, drafted, judged_now, control, lag)

    def _over_fixed(self, diff: Tensor, mask: Tensor) -> _Found | None:
        """The user's own bound on the mean."""
        bound = self._config.logprob_tolerance
        assert bound is not None
        mean = spread(diff, mask, math.inf).mean
        return _Found("the mean difference of the batch", mean, bound, mask & (diff > bound)) if mean > bound else None

    def _too_far(self, diff: Tensor, mask: Tensor, found: Windows, control: Windows, lag: int) -> _Found | None:
        """Too many windows further off than plain text is."""
        history = self._past
        for name, values, past, now in (
            ("mean", found.means, history.means, control.means),
            ("largest", found.maxima, history.maxima, control.maxima),
        ):
            bounds = self._bounds[name]
            verdict = self._verdict(values, past, bounds, bounds.factor, lag)
            if verdict.p_value > ERROR_LEVEL:
                continue
            same = len(now) >= _CONTROL and median(values) <= bounds.factor * median(now)
            if same and self._verdict(values, past, bounds, bounds.jump, lag).p_value > ERROR_LEVEL:
                continue  # drift: plain requests of the same phase show it, too
            what = f"the {name} difference in {verdict.above} of {verdict.of} stretches of text"
            return _Found(what, median(values), verdict.bound, mask & (diff > verdict.bound))
        return None

    def _verdict(
        self, values: tuple[float, ...], past: tuple[float, ...], bounds: Bounds, factor: float, lag: int
    ) -> Verdict:
        if lag:  # the policy has really moved in between
            return judged(values, _LAG_FACTOR * lag * bounds.most * self._scale)
        if len(past) < ENOUGH:
            return judged(values, bounds.most * self._scale)
        return compared(values, past, factor, bounds.least * self._scale)

    def _beyond(self, diff: Tensor, mask: Tensor, lag: int) -> _Found | None:
        """A single sequence, far beyond anything that was ever seen."""
        largest = max(self._past.means, default=0.0)
        bound = max(_BEYOND * self._bounds["mean"].most * self._scale, _BEYOND_PLAIN * largest) * (
            1 + _LAG_FACTOR * lag
        )
        lengths = mask.sum(-1)
        means = diff.masked_fill(~mask, 0.0).sum(-1) / lengths.clamp_min(1)
        rows = (lengths >= _LONG) & (means > bound)
        if not bool(rows.any()):
            return None
        return _Found("the mean difference of a sequence", float(means[rows].max()), bound, mask & rows[:, None])

    def _warn(self, found: _Found, batch: LogprobBatch) -> None:
        self._alarms += 1
        if self._alarms == 1:
            logger.warning(
                "spec-plugin: without drafts, too, %s. The run goes on, as it would without the flag; "
                "later phases are counted in spec/logprob_alarms",
                _described(found, batch),
            )

    def _remember(self, phase: _Phase) -> None:
        plain = phase.plain
        if self._history and self._history[-1].version == phase.version:
            plain = self._history.pop().plain + plain
        self._history.append(replace(phase, plain=Windows(plain.means[:KEPT], plain.maxima[:KEPT])))

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Differences of the last batch, what plain text shows, and from where on a window counts against the run."""
        if self._last is None:
            return {}
        past = self._past
        bound = self._config.logprob_tolerance or self._verdict((0.0,), past.means, self._bounds["mean"], 3.0, 0).bound
        out = {
            "spec/logprob_diff_mean": self._last.mean,
            "spec/logprob_diff_p9999": self._last.most,
            "spec/logprob_diff_max": self._last.max,
            "spec/logprob_far": self._last.far,
            "spec/logprob_tolerance": bound,
            "spec/logprob_alarms": float(self._alarms),
            "spec/versions_known": self._versions_known,
        }
        return out | ({"spec/logprob_diff_plain": median(past.means)} if len(past) else {})

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """What plain requests showed: a resumed run may begin with drafts."""
        path.mkdir(parents=True, exist_ok=True)
        phases = [asdict(phase) for phase in self._history]
        partial = path / "provenance.json.partial"
        partial.write_text(json.dumps({"of": self._kind(), "phases": phases}))
        os.replace(partial, path / "provenance.json")

    @hookimpl
    def spec_load(self, path: Path) -> None:
        """What they showed before, if dtypes and temperature are still the same."""
        file = path / "provenance.json"
        if not file.exists():
            return
        found = json.loads(file.read_text())
        if found["of"] == self._kind():
            for p in found["phases"]:
                plain = Windows(tuple(p["plain"]["means"]), tuple(p["plain"]["maxima"]))
                self._history.append(_Phase(int(p["version"]), plain, bool(p["drafted"])))

    def _kind(self) -> list[str]:
        return [self._target.dtype, self._target.actor_dtype, f"{self._scale:.6g}"]


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
