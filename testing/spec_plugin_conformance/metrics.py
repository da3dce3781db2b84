"""The schema of ``spec/*``: each metric that a run may log, with unit, bounds and meaning: docs/reference/metrics.md has them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from spec_plugin.api.speculation import Reason, Speculation


@dataclass(frozen=True)
class Metric:
    """One name, or a family of names with a number in braces."""

    name: str
    unit: str  # "" for counts, shares and lengths
    low: float
    high: float
    meaning: str


#: every metric that the built-in plugins report
SCHEMA = (
    Metric("spec/state", "", 0, max(Speculation), "does it draft in this step: see Codes below"),
    Metric("spec/reason", "", 0, max(Reason), "why, or why not: see Codes below"),
    Metric("spec/on", "", 0, 1, "1 if any batch size speculates in this step"),
    Metric("spec/dropped", "", 0, 1, "1 if the draft did not pay and was dropped within the last rollout"),
    Metric("spec/failed", "", 0, 1, "1 while draft trouble has turned speculation off"),
    Metric("spec/recoveries", "", 0, 64, "fresh starts after draft trouble since the run began, see recoveries"),
    Metric(
        "spec/acceptance_length",
        "",
        1,
        17,
        "mean tokens per forward pass of the policy in the engine, bonus token included; 1.0 is no gain",
    ),
    Metric(
        "spec/tokens_per_forward",
        "",
        1,
        17,
        "the same without tokens beyond a response's end, and with forward passes for which a look-up (ngram) found no draft: "
        "vLLM counts the former and leaves out the latter",
    ),
    Metric(
        "spec/shadow_tokens_per_forward",
        "",
        1,
        17,
        "of suffix, while nothing is drafted: what tokens_per_forward would have been",
    ),
    Metric("spec/acceptance_pos_{i}", "", 0, 1, "share of verification steps that accepted drafted token i"),
    Metric("spec/expected_acceptance", "", 1, 17, "acceptance length that draft training predicts"),
    Metric(
        "spec/draft_temperature",
        "",
        0,
        1,
        "at which the draft's proposals are drawn, as a factor of the rollouts' temperature; 0: its likeliest tokens",
    ),
    Metric(
        "spec/entropy", "nats", 0, 20, "entropy of what the rollouts sample from, per token, where training replays it"
    ),
    Metric(
        "spec/ceiling",
        "",
        1,
        17,
        "acceptance length of a perfect draft that proposes the policy's likeliest token, at spec.k",
    ),
    Metric("spec/break_even_b{size}", "", 0, 1e3, "acceptance length from which speculation pays at this batch size"),
    Metric("spec/k_b{size}", "", 0, 16, "tokens drafted per request at this batch size in this step"),
    Metric(
        "spec/speedup_predicted", "", 0, 100, "predicted decoding speed of the schedule, relative to plain decoding"
    ),
    Metric(
        "spec/speedup_realised",
        "",
        0,
        100,
        "decoding speed of the last rollout with drafts, relative to plain decoding: of its own timings, put right by pairs",
    ),
    Metric(
        "spec/saved_s", "s", -1e6, 1e6, "generation that the trainer did not wait for in this step, see What it earns"
    ),
    Metric("spec/cost_s", "s", 0, 1e6, "time of draft training, harvest, refreshes and self-tests in this step"),
    Metric("spec/net_s", "s", -1e6, 1e6, "saved_s less cost_s"),
    Metric("spec/saved_so_far_s", "s", -1e9, 1e9, "saved_s of all steps of this process"),
    Metric("spec/cost_so_far_s", "s", 0, 1e9, "cost_s of all steps of this process"),
    Metric("spec/net_so_far_s", "s", -1e9, 1e9, "saved_so_far_s less cost_so_far_s"),
    Metric("spec/generation_s", "s", 0, 1e5, "time of the rollout phase in the engine"),
    Metric("spec/generation_tokens", "", 1, 1e12, "tokens that it generated"),
    Metric(
        "spec/prefix_tokens_recomputed",
        "",
        0,
        1e12,
        "prompt tokens that the prefix cache had and that were read anew: vLLM drops a block of each hit for the draft's sake",
    ),
    Metric("spec/policy_version", "", 0, 1e9, "version of the policy that rolled out"),
    Metric(
        "spec/policy_lag",
        "",
        0,
        1e9,
        "policy versions between sampling and recomputation, mean of the step's tokens; 0 in synchronous training",
    ),
    Metric("spec/draft_version", "", 0, 1e12, "version of the draft that the engine serves"),
    Metric("spec/refresh_ms", "ms", 0, 1e6, "time of the last refresh"),
    Metric("spec/refresh_refused", "", 0, 1e9, "refreshes that the engine refused since the run began"),
    Metric("spec/harvest_ms", "ms", 0, 1e6, "time of copying hidden states in this step"),
    Metric("spec/harvest_tokens", "", 0, 1e12, "tokens harvested in this step"),
    Metric("spec/buffer_tokens", "", 0, 1e12, "harvested tokens that the buffer holds"),
    Metric("spec/memory_tokens", "", 0, 1e12, "tokens of rollouts that suffix keeps to draft from"),
    Metric("spec/draft_loss", "nats", 0, 1e4, "loss of the last slice of draft training"),
    Metric("spec/train_ms", "ms", 0, 1e7, "time of that slice"),
    Metric("spec/train_share", "", 0, 0.5, "train_share, less where training no longer raises acceptance"),
    Metric("spec/train_steps", "", 0, 1e4, "optimizer steps in it"),
    Metric(
        "spec/head_start_ms", "ms", 0, 1e7, "time that the last slice was allowed beyond train_share, see head_start"
    ),
    Metric("spec/logprob_diff_mean", "nats", 0, 1, "mean of abs(rollout - recomputed) log-prob in this step"),
    Metric("spec/logprob_diff_p9999", "nats", 0, 1e2, "99.99 % of its tokens differ by no more"),
    Metric("spec/logprob_diff_max", "nats", 0, 1e2, "largest difference of one token"),
    Metric(
        "spec/logprob_diff_plain",
        "nats",
        0,
        1,
        "the reference: median of the mean difference in windows of plain text, last phases",
    ),
    Metric("spec/logprob_far", "", 0, 1, "fraction of tokens that differ by more than max_plausible, see guards.md"),
    Metric("spec/logprob_tolerance", "nats", 0, math.inf, "mean difference from which a window counts against the run"),
    Metric(
        "spec/logprob_alarms", "", 0, 1e9, "phases without drafts whose log-probs looked wrong, since the run began"
    ),
    Metric(
        "spec/exactness",
        "",
        -1e6,
        1e6,
        "evidence from the run's own text that the engine does not sample from the policy: a right run reaches x with a chance "
        "of 10^-x at most; a line at 3, the run stops at 7",
    ),
    Metric("spec/exactness_tokens", "", 0, 1e12, "tokens that it stands on since the run began; 0: no evidence"),
    Metric(
        "spec/unproven",
        "",
        0,
        9,
        "self-test checks that found nothing wrong and could not prove it; a warning names them",
    ),
    Metric("spec/provenance", "", 0, 1, "1 while the engine's log-probs are compared with the policy's"),
    Metric("spec/versions_known", "", 0, 1, "share of sequences whose policy version is known"),
)
_PATTERNS = tuple((re.compile(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(m.name))), m) for m in SCHEMA)


def describe(name: str) -> Metric | None:
    """The schema's entry for a metric, e.g. for ``spec/acceptance_pos_2``; None for an unknown name."""
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)
