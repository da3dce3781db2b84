"""Mistakes that an attack from outside made, and that no test of the time noticed."""

from __future__ import annotations

from mutants.mutation import Mutation

_SPANS, _SWAP, _STAGES = (
    "spec_plugin/api/spans.py",
    "spec_plugin/engine/refresh/swap.py",
    "spec_plugin/engine/selftest/stages.py",
)
_EXACT = "spec_plugin/policy/provenance/exact.py"

MUTATIONS = (
    Mutation(
        _SPANS,
        "_of_these",
        "else min(s.version for s in spans)",
        "else max(s.version for s in spans)",
        "law 3: old text is judged as the newest that reads like it",
        ("test_spans.py",),
    ),
    Mutation(
        _SPANS,
        "Spans.of",
        "found[row, max(0, span.first - start) : max(0, span.until - start)]",
        "found[row, max(0, span.first - start) :]",
        "law 3: tokens that no engine has spoken of get the version of those before them",
        ("test_spans.py",),
    ),
    Mutation(
        "spec_plugin/trainer/spec_run.py",
        "SpecRun.weights_synced",
        "self._asked, self._with_log_probs = False, []",
        "self._with_log_probs = []",
        "law 3: where rollouts overlap, a phase is judged by what the engines said before it",
        ("test_run.py",),
    ),
    Mutation(
        "spec_plugin/engine/front.py",
        "EngineFront.sample",
        "if listed and self._rollouts_began and not given:",
        "if self._rollouts_began and not given:",
        "a request that drafts nowhere has a stretch of the control group",
        ("test_front_phase.py",),
    ),
    Mutation(
        _EXACT,
        "by_lag",
        "masked_fill(versions == later, 1) + batch.ahead",
        "masked_fill(versions == later, 1)",
        "law 3: a correct run is stopped, whose weights were trained since the sync",
        ("test_provenance_lag_bounds.py",),
    ),
    Mutation(
        _EXACT,
        "by_lag",
        "yield int(batch.lag_allowed) + batch.ahead, batch",
        "yield int(batch.lag_allowed), batch",
        "law 3: the same where the engine's log-probs are not there",
        ("test_provenance_lag_bounds.py",),
    ),
    Mutation(
        "spec_plugin/policy/provenance/reference.py",
        "Reference.judge_sequences",
        "median(list(means.values())) if self._lag else 0.0",
        "median(list(means.values()))",
        "law 3: a batch that is wrong as a whole is the measure of itself",
        ("test_provenance_lag_bounds.py",),
    ),
    Mutation(
        "spec_plugin/engine/selftest/verdicts.py",
        "evidence_check",
        "if base.log_ratio >= most:",
        "if base.log_ratio >= 0.7:",
        "law 2: any plain arm but the most likely one excuses a drafted one that is refused",
        ("test_selftest_stats.py::test_law_2_only_a_plain_arm_that_is_refused_itself_excuses_the_other",),
    ),
    Mutation(
        _STAGES,
        "_samples",
        "plan.half_batch, 2 * (plan.k + 1) + 1",
        "plan.half_batch, plan.k + 1",
        "law 2: no second round of verification is looked at",
        ("test_selftest_stages.py",),
    ),
    Mutation(
        _STAGES,
        "samples_stage",
        "await probe.engine.reset_prefix_cache()",
        "pass",
        "law 2: log-probs are recomputed from the cache that speculation wrote",
        ("test_selftest_stages.py",),
    ),
    Mutation(
        "spec_plugin/engine/selftest/probe.py",
        "Probe.both_arms",
        "for plain in (False, True)]",
        "for plain in (True, True)]",
        "law 2: both arms are plain, and nothing is tested",
        ("test_selftest_stages.py",),
    ),
    Mutation(
        _SWAP,
        "restore",
        "if not same_bits(parameter.detach().to(backup[name].device), backup[name]):",
        "if False:",
        "law 5: a draft that could not be put back is served",
        ("test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        "swap",
        "if p.data_ptr() != addresses[name]]",
        "if False]",
        "law 5: a parameter that was replaced while loading is not seen, and captured graphs read the old one",
        ("test_refresh_checks.py",),
    ),
)
