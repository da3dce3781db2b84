"""The provenance guard: every log-prob that enters the loss is finite, and the target's, at the recorded version (law 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from spec_plugin.config import SpecConfig
from spec_plugin.errors import LogprobProvenanceError
from spec_plugin.events import LogprobBatch, TargetInfo
from spec_plugin.hookspecs import hookimpl

#: Mean and single-token |rollout - recomputed| that two correct implementations of one model may show, by the coarser
#: of their dtypes. Measured on real runs: float32 means of 1e-5..1e-4, bfloat16 means of 5e-3..2e-2.
_MEAN_FLOOR = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
_TOKEN_FLOOR = {"float32": 0.05, "float16": 1.0, "bfloat16": 3.0}
_COARSENESS = ("float32", "float16", "bfloat16")
#: A speculation-off step of the same run may raise the mean tolerance to this multiple of what it showed.
_BASELINE_FACTOR = 3.0
#: and never beyond this multiple of the dtype's floor: a run that drifts step by step must not carry its tolerance along.
_BASELINE_CAP = 10.0
#: Sequences are shorter than batches, so their means scatter more.
_SEQUENCE_FACTOR = 5.0
#: log p <= 0; two roundings of a token with p = 1 may land just above.
_ABOVE_ZERO = 1e-3
#: Asynchronous training: each policy version between sampling and recomputation may add this multiple of the mean
#: tolerance (0.3 nats a version in bfloat16). Log-probs of another model are further away than that.
_LAG_FACTOR = 10.0
_SHOWN = 3


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |rollout - recomputed| log-prob, in nats."""

    mean: float  # over the batch
    sequence: float  # mean over any one sequence
    token: float  # any one token

    def widened(self, lag: int) -> Tolerance:
        """For sequences that a policy ``lag`` versions older sampled: the policy has really moved in between."""
        if lag == 0:
            return self
        factor = _LAG_FACTOR * lag
        return Tolerance(factor * self.mean, factor * self.sequence, math.inf)

    @classmethod
    def of(
        cls, rollout_dtype: str, actor_dtype: str, baseline_mean: float = 0.0, fixed: float | None = None
    ) -> Tolerance:
        """From the coarser of the two dtypes and the mean that the run's own speculation-off steps showed.

        Args:
            rollout_dtype: dtype of the engine's weights.
            actor_dtype: dtype in which the actor recomputes.
            baseline_mean: largest batch mean seen with speculation off, 0.0 when none was.
            fixed: the user's own bound on the mean; replaces both sources.
        """
        coarser = max(rollout_dtype, actor_dtype, key=_COARSENESS.index)
        mean = fixed if fixed is not None else _from_baseline(_MEAN_FLOOR[coarser], baseline_mean)
        scale = mean / _MEAN_FLOOR[coarser]
        return cls(mean, _SEQUENCE_FACTOR * mean, _TOKEN_FLOOR[coarser] * max(1.0, scale))


def _from_baseline(floor: float, baseline_mean: float) -> float:
    return min(max(floor, _BASELINE_FACTOR * baseline_mean), _BASELINE_CAP * floor)


@dataclass(frozen=True)
class Agreement:
    """How far rollout and recomputed log-probs of one batch differ, in nats."""

    mean: float
    max: float
    worst_sequence: float
    tokens: int


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
        rows = lags == lag
        yield (
            int(lag),
            replace(
                batch,
                recomputed=batch.recomputed[rows],
                rollout=batch.rollout[rows],
                mask=batch.mask[rows],
                rollout_versions=batch.rollout_versions[rows],
            ),
        )


def _difference(recomputed: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """|rollout - recomputed| under the mask, else zero: a product would keep NaN from padding, and NaN > bound is False."""
    return (rollout - recomputed).abs().masked_fill(~mask, 0.0)


def agreement(recomputed: Tensor, rollout: Tensor, mask: Tensor) -> Agreement:
    """Statistics of |rollout - recomputed| over the masked tokens; all inputs [B, T]."""
    diff = _difference(recomputed, rollout, mask).double()
    per_sequence = diff.sum(-1) / mask.sum(-1).clamp_min(1)
    tokens = int(mask.sum())
    if tokens == 0:
        return Agreement(0.0, 0.0, 0.0, 0)
    return Agreement(float(diff.sum() / tokens), float(diff.max()), float(per_sequence.max()), tokens)


def check_agreement(batch: LogprobBatch, tolerance: Tolerance) -> Agreement:
    """Refuse rollout log-probs that the recomputation at the same version does not confirm.

    Raises:
        LogprobProvenanceError: with the statistic that failed, its bound, and the first sequences, positions and values.
    """
    assert batch.rollout is not None
    got = agreement(batch.recomputed, batch.rollout, batch.mask)
    diff = _difference(batch.recomputed, batch.rollout, batch.mask)
    mean_of = (diff.sum(-1) / batch.mask.sum(-1).clamp_min(1))[:, None].expand_as(diff)
    for what, value, bound, where in (
        ("mean difference over the batch", got.mean, tolerance.mean, diff > tolerance.mean),
        ("mean difference of a sequence", got.worst_sequence, tolerance.sequence, mean_of > tolerance.sequence),
        ("difference of a token", got.max, tolerance.token, diff > tolerance.token),
    ):
        if value > bound:
            values = {"rollout": batch.rollout, "recomputed": batch.recomputed}
            state = "on" if batch.speculating else "off"
            raise LogprobProvenanceError(
                f"rollout log-probs are not the target's at policy version {batch.policy_version}: {what} is "
                f"{value:.3g}, allowed {bound:.3g} (speculation was {state}): {_show(where & batch.mask, values)}. {_ADVICE}"
            )
    return got


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
    """Checks each batch; keeps the run's own speculation-off baseline for the tolerance."""

    def __init__(self) -> None:
        self._baseline = 0.0
        self._comparable = True
        self._last: Agreement | None = None
        self._versions_known = 0.0

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo) -> None:
        """Remember the dtypes; truncated sampling makes the engine's log-probs renormalised, hence not comparable."""
        self._config, self._target = config, target
        self._comparable = not target.truncated

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
            for lag, part in by_version(batch):
                found = check_agreement(part, self._tolerance().widened(lag))
                if lag == 0 and not batch.speculating:
                    self._baseline = max(self._baseline, found.mean)
            self._last = agreement(batch.recomputed, batch.rollout, batch.mask)
        elif batch.rollout_in_loss:
            raise LogprobProvenanceError(
                f"rollout log-probs enter the loss, but with top_p={self._target.sampling.get('top_p')}, "
                f"top_k={self._target.sampling.get('top_k')} they are those of the truncated distribution and cannot be "
                "verified against the actor's; set top_p=1.0 and top_k=-1, or turn bypass_mode, rollout_is and rollout_rs off"
            )

    def _tolerance(self) -> Tolerance:
        fixed = self._config.logprob_tolerance
        return Tolerance.of(self._target.dtype, self._target.actor_dtype, self._baseline, fixed)

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Mean and largest difference of the last batch, the bound that held, and the share of sequences with a known version."""
        if self._last is None:
            return {}
        return {
            "spec/logprob_diff_mean": self._last.mean,
            "spec/logprob_diff_max": self._last.max,
            "spec/logprob_tolerance": self._tolerance().mean,
            "spec/versions_known": self._versions_known,
        }
