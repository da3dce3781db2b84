"""The metrics sink: what the engine did, under ``spec/*`` names that are the same for every trainer's logger.

docs/reference/metrics.md says what each means; with which bounds, the kit's ``spec_plugin_conformance.metrics``.
"""

from __future__ import annotations

from spec_plugin.api.events import DraftRefresh, HiddenStates, RefreshReport, RolloutStats
from spec_plugin.api.hookspecs import hookimpl


class MetricsSink:
    """Keeps the latest rollout, refresh and harvest; sums over one trainer step where a step has several."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._harvest_ms = 0.0
        self._harvest_tokens = 0
        self._refused = 0

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        """Acceptance and speed of the finished rollout phase."""
        kept = {k: v for k, v in self._values.items() if not k.startswith(("spec/acceptance", "spec/shadow"))}
        kept["spec/policy_version"] = float(stats.policy_version)
        kept["spec/generation_s"] = stats.seconds
        kept["spec/generation_tokens"] = float(stats.tokens)
        kept["spec/prefix_tokens_recomputed"] = float(stats.recomputed_tokens)
        kept["spec/acceptance_length"] = stats.acceptance_length or 1.0
        kept["spec/tokens_per_forward"] = stats.tokens_per_forward or 1.0
        if stats.shadow_tokens_per_forward is not None:
            kept["spec/shadow_tokens_per_forward"] = stats.shadow_tokens_per_forward
        for i, accepted in enumerate(stats.accepted_per_pos):
            kept[f"spec/acceptance_pos_{i}"] = accepted / stats.drafts if stats.drafts else 0.0
        self._values = kept

    @hookimpl
    def spec_refreshed(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        """The version that the engine serves, and what the refresh cost."""
        self._refused += not report.installed
        self._values["spec/draft_version"] = float(report.draft_version)
        self._values["spec/refresh_ms"] = report.milliseconds
        self._values["spec/refresh_refused"] = float(self._refused)

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        """Cost of the harvest, summed over the micro-batches of a step."""
        self._harvest_ms += hidden.milliseconds
        self._harvest_tokens += sum(hidden.lengths)

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """The step's values; the sums start anew."""
        out = dict(self._values)
        out["spec/harvest_ms"] = self._harvest_ms
        out["spec/harvest_tokens"] = float(self._harvest_tokens)
        self._harvest_ms, self._harvest_tokens = 0.0, 0
        if "spec/refresh_ms" in self._values:  # a step without a refresh has had none
            self._values["spec/refresh_ms"] = 0.0
        return out
