from __future__ import annotations

import math
import re

import torch
from builders.paths import ROOT
from spec_plugin_conformance.metrics import SCHEMA, describe

from spec_plugin.api.events import DraftRefresh, HiddenStates, RefreshReport, RolloutStats
from spec_plugin.policy.metrics import MetricsSink


def harvested(tokens: int, milliseconds: float) -> HiddenStates:
    ids = torch.zeros(tokens, dtype=torch.int64)
    return HiddenStates(ids, ids[:, None], ids[:, None], ids > 0, (tokens,), 0, milliseconds)


def refresh(sink: MetricsSink, installed: bool, version: int) -> None:
    sink.spec_refreshed(DraftRefresh(version, 0, {}, ""), RefreshReport(installed, version, "", 12.5))


def test_acceptance_counts_the_bonus_token_and_positions_are_rates():
    sink = MetricsSink()
    sink.spec_rollout_end(RolloutStats(4, 8, 500, 2.0, 100, 300, 250, (95, 85, 70), recomputed_tokens=48))
    assert sink.spec_metrics()["spec/prefix_tokens_recomputed"] == 48.0
    metrics = sink.spec_metrics()
    assert metrics["spec/acceptance_length"] == 3.5
    assert [metrics[f"spec/acceptance_pos_{i}"] for i in range(3)] == [0.95, 0.85, 0.70]
    assert (metrics["spec/policy_version"], metrics["spec/generation_s"], metrics["spec/generation_tokens"]) == (
        4,
        2,
        500,
    )


def test_a_phase_without_drafts_has_acceptance_length_one_and_no_nan():
    sink = MetricsSink()
    sink.spec_rollout_end(RolloutStats(0, 8, 500, 2.0, accepted_per_pos=(0, 0)))
    metrics = sink.spec_metrics()
    assert metrics["spec/acceptance_length"] == 1.0
    assert all(math.isfinite(v) for v in metrics.values())


def test_positions_of_an_earlier_phase_do_not_linger():
    sink = MetricsSink()
    sink.spec_rollout_end(RolloutStats(0, 8, 500, 2.0, 100, 300, 250, (95, 85, 70)))
    sink.spec_rollout_end(RolloutStats(1, 8, 500, 2.0, 100, 100, 90, (90,)))
    assert [k for k in sink.spec_metrics() if "pos" in k] == ["spec/acceptance_pos_0"]


def test_harvest_is_summed_over_micro_batches_and_starts_anew_each_step():
    sink = MetricsSink()
    sink.spec_target_forward(harvested(10, 1.5))
    sink.spec_target_forward(harvested(20, 2.0))
    first, second = sink.spec_metrics(), sink.spec_metrics()
    assert (first["spec/harvest_tokens"], first["spec/harvest_ms"]) == (30.0, 3.5)
    assert (second["spec/harvest_tokens"], second["spec/harvest_ms"]) == (0.0, 0.0)


def test_refused_refreshes_are_counted_over_the_run_and_the_served_version_is_the_engines():
    sink = MetricsSink()
    refresh(sink, True, 1)
    refresh(sink, False, 1)
    refresh(sink, False, 1)
    metrics = sink.spec_metrics()
    assert metrics["spec/draft_version"] == 1.0
    assert metrics["spec/refresh_refused"] == 2.0
    assert metrics["spec/refresh_ms"] == 12.5


def test_every_name_has_the_prefix_and_every_value_is_a_float():
    sink = MetricsSink()
    refresh(sink, True, 1)
    sink.spec_rollout_end(RolloutStats(0, 8, 500, 2.0, 100, 300, 250, (95, 85, 70)))
    assert all(k.startswith("spec/") and isinstance(v, float) for k, v in sink.spec_metrics().items())


def test_the_documents_table_is_the_schema():
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(spec/[^`]+)` \| (.*) \|$", reference, re.M))
    assert rows == {m.name: m.meaning for m in SCHEMA}


def test_the_schema_knows_families_and_no_strangers():
    assert describe("spec/acceptance_pos_2").name == "spec/acceptance_pos_{i}"
    assert describe("spec/break_even_b16").unit == ""
    assert describe("spec/acceptance_pos_x") is None and describe("actor/spec/on") is None
