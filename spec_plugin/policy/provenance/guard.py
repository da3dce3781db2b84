"""The hooks of the provenance guard, and what it says."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

from torch import Tensor

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import Drafts, LogprobBatch, StatedLogprobs, TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.plan.text_files import write_whole
from spec_plugin.policy.provenance.exact import (
    ADVICE,
    by_lag,
    check_finite,
    check_origin,
    check_versions,
    first_tokens,
)
from spec_plugin.policy.provenance.reference import Reference, Refusal
from spec_plugin.policy.provenance.rows import RowEvidence
from spec_plugin.policy.provenance.rules import MAX_PLAUSIBLE, SEQUENCE_TOKENS, Precision
from spec_plugin.policy.provenance.windows import difference, difference_metrics, median, sequence_means, windows

logger = logging.getLogger(__name__)

_COARSE = (
    "spec-plugin: engine and actor are both float32, and differ by %.1e nats a token on plain text, drafts or none: rounding to "
    "float32 explains 1e-4 at most. The likely cause is a weight sync that goes through bfloat16 (a bucket, an adapter merged in "
    "bfloat16), so that the engine samples from a slightly other policy; or matrix multiplications in TF32. The run goes on, as "
    "it would without the flag"
)


class ProvenanceGuard:
    """Checks each batch, and keeps what the run's own plain requests show."""

    def __init__(self) -> None:
        self._references: dict[int, Reference] = {}  # by lag
        self._rng = random.Random(0)
        self._comparable = True
        self._differences: dict[str, float] = {}  # of the last batch, as metrics
        self._lag = 0.0  # mean, of the last batch's tokens
        self._versions_known = 0.0
        self._coarse = False  # was it said that plain text is coarser than its dtype
        self._alarms = 0
        self._alarmed: int | None = None  # the last policy version whose plain text raised one

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo) -> None:
        """Choose bounds by dtype and temperature; log-probs of truncated sampling are renormalised, hence not comparable."""
        self._config, self._target = config, target
        self._comparable = not target.truncated
        self._precision, self._references = Precision.of(target), {}
        self._rows = RowEvidence(self._precision)
        #: what may be compared after a resume
        self._kind = [target.dtype, target.actor_dtype, f"{self._precision.scale:.6g}"]

    def _reference(self, lag: int) -> Reference:
        return self._references.setdefault(lag, Reference(lag, self._precision))

    @hookimpl
    def spec_check_stated(self, batch: StatedLogprobs) -> None:
        """Finite and right version; what cannot be compared here is compared on a sample.

        Raises:
            LogprobProvenanceError: on the first violation.
        """
        check_finite("rollout", batch.rollout, batch.mask)
        check_versions(batch)
        check_origin(batch, self._config.unsampled_rows == "allow")

    @hookimpl
    def spec_check_logprobs(self, batch: LogprobBatch) -> None:
        """Finite, right version, and confirmed by the recomputation.

        Raises:
            LogprobProvenanceError: on the first violation.
        """
        check_finite("recomputed", batch.recomputed, batch.mask)
        check_versions(batch)
        self._versions_known = float(((batch.versions >= 0) & batch.mask).any(-1).double().mean())
        if batch.rollout is not None:
            check_finite("rollout", batch.rollout, batch.mask)
        check_origin(batch, self._config.unsampled_rows == "allow")
        if batch.rollout is None:
            return
        if self._comparable:
            diff = difference(batch.recomputed, batch.rollout, batch.mask)
            far = MAX_PLAUSIBLE.of("largest", self._precision, 0)
            self._differences = difference_metrics(diff, batch.mask, far)
            parts = list(by_lag(batch))
            tokens = sum(int(part.mask.sum()) for _, part in parts)
            self._lag = sum(lag * int(part.mask.sum()) for lag, part in parts) / max(1, tokens)
            for lag, part in parts:
                self._compare(part, lag)
        elif batch.rollout_in_loss:
            raise LogprobProvenanceError(
                f"rollout log-probs enter the loss, but with top_p={self._target.sampling.get('top_p')}, "
                f"top_k={self._target.sampling.get('top_k')} they are those of the truncated distribution and cannot be "
                "verified against the actor's; set top_p=1.0 and top_k=-1, or turn bypass_mode, rollout_is and rollout_rs off"
            )

    def _compare(self, batch: LogprobBatch, lag: int) -> None:
        """One part of a batch, all of one age: judge the drafted text, learn from the plain text."""
        assert batch.rollout is not None
        reference = self._reference(lag)
        version, tolerance = batch.policy_version, self._config.logprob_tolerance
        diff = difference(batch.recomputed, batch.rollout, batch.mask)
        drafted, speculating = batch.mask & (batch.drafted == Drafts.ON), batch.speculating
        plain = batch.mask & ~drafted
        shown = windows(diff, plain, self._rng)
        if tolerance is not None:
            refusal = _over_tolerance(diff, drafted, tolerance)
        else:
            refusal = (
                reference.judge_sequences(sequence_means(diff, drafted, SEQUENCE_TOKENS))
                or (
                    self._rows.judge(batch.recomputed, batch.rollout, drafted) if lag == 0 else None
                )  # a policy's move has a direction
                or reference.judge(windows(diff, drafted, self._rng), reference.control(shown, version), version)
            )
            if lag == 0 and not speculating:
                self._rows.learn(batch.recomputed, batch.rollout, plain)
        if refusal is not None:
            raise LogprobProvenanceError(f"{_described(refusal, batch, diff, drafted)}. {ADVICE}")
        alarm = reference.learn(shown, version, speculating)
        if tolerance is not None:
            alarm = None if speculating else _over_tolerance(diff, plain, tolerance)
        if alarm is not None:
            self._warn(_described(alarm, batch, diff, plain), version)
        if not self._coarse and (coarse := self._reference(0).coarse) is not None:
            self._coarse = True
            logger.warning(_COARSE, coarse)

    def _warn(self, alarm: str, version: int) -> None:
        """One warning for each policy version, however many of its batches look wrong."""
        if version == self._alarmed:
            return
        self._alarms, self._alarmed = self._alarms + 1, version
        logger.warning(
            "spec-plugin: without drafts, too, %s. The run goes on, as it would without the flag; this rollout is left out "
            "of the reference (alarm %d, see spec/logprob_alarms)",
            *(alarm, self._alarms),
        )

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Differences of the last batch, what plain text shows, and from where on a window counts against the run."""
        if not self._differences:
            return {}
        reference = self._reference(0)
        out = {
            **self._differences,
            "spec/logprob_tolerance": self._config.logprob_tolerance or reference.tolerance,
            "spec/logprob_alarms": float(self._alarms),
            "spec/versions_known": self._versions_known,
            "spec/policy_lag": self._lag,
        }
        return out | ({"spec/logprob_diff_plain": median(reference.plain.means)} if reference.plain else {})

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """Write the reference to provenance.json: a resumed run may begin with drafts, before any plain text."""
        path.mkdir(parents=True, exist_ok=True)
        phases = [phase for reference in self._references.values() for phase in reference.state()]
        state = {"of": self._kind, "phases": phases, "rows": self._rows.state()}
        write_whole(path / "provenance.json", json.dumps(state))

    @hookimpl
    def spec_load(self, path: Path) -> None:
        """Restore the reference, if dtypes and temperature are still the same."""
        file = path / "provenance.json"
        if not file.exists():
            return
        found = json.loads(file.read_text())
        if found["of"] == self._kind:
            for phase in found["phases"]:
                self._reference(int(phase.get("lag", 0))).restore(phase)
            if "rows" in found:
                self._rows.restore(found["rows"])


def _over_tolerance(diff: Tensor, mask: Tensor, tolerance: float) -> Refusal | None:
    """The user's own bound on the mean of a batch, in place of the table."""
    mean = float(diff[mask].double().mean()) if bool(mask.any()) else 0.0
    return Refusal("the mean difference of the batch", mean, tolerance) if mean > tolerance else None


def _described(refusal: Refusal, batch: LogprobBatch, diff: Tensor, mask: Tensor) -> str:
    assert batch.rollout is not None
    values = {"rollout": batch.rollout, "recomputed": batch.recomputed}
    tokens = first_tokens(refusal.where(diff, mask), values)
    state = "on" if batch.speculating else "off"
    return (
        f"rollout log-probs are not the target's at policy version {batch.policy_version}: {refusal.what} is beyond "
        f"{refusal.bound:.3g} nats (found {refusal.value:.3g}; speculation was {state}), first at {tokens}"
    )
