"""The bounds of the guard where a run has no plain text, and how much of it a reference keeps."""

from __future__ import annotations

import pytest

from spec_plugin import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.policy.provenance import ProvenanceGuard
from spec_plugin.policy.provenance.exceedance import exceedance_test
from spec_plugin.policy.provenance.reference import KEPT, Reference
from spec_plugin.policy.provenance.rules import MAX_PLAUSIBLE, PHASES, Precision
from spec_plugin.policy.provenance.windows import Windows


def reference(dtype: str) -> Reference:
    return Reference(0, Precision(dtype, scale=1.0))


def windows(mean: float, largest: float, count: int = 32) -> Windows:
    return Windows((mean,) * count, (largest,) * count)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [("float32", 2e-3, 0.05), ("float16", 3e-2, 1.0), ("bfloat16", 0.1, 3.0)]
)
def test_law_3_without_plain_text_drafted_text_may_differ_by_what_correct_runs_show_and_no_more(dtype, mean, largest):
    """Means of correct bfloat16 runs are 5e-3 to 4e-2 nats, single tokens beyond 1."""
    known = reference(dtype)
    assert known.judge(windows(0.9 * mean, 0.9 * largest), Windows(), 1) is None
    for found in (windows(1.1 * mean, 0.9 * largest), windows(0.1 * mean, 1.1 * largest)):
        assert known.judge(found, Windows(), 1) is not None
    assert MAX_PLAUSIBLE.of("largest", Precision(dtype, scale=1.0), 0) == largest and known.tolerance == mean


def test_no_phase_of_plain_text_outweighs_the_others():
    known = reference("float32")
    known.learn(windows(1e-5, 1e-4, 5 * KEPT), 1, drafted=False)
    for _ in range(3):
        known.learn(windows(1e-5, 1e-4, KEPT), 2, drafted=False)
    assert len(known.plain) == 2 * KEPT == len(known.plain.maxima)


def test_what_plain_text_showed_long_ago_is_forgotten():
    known = reference("float32")
    known.learn(windows(1e-3, 0.01), 0, drafted=False)
    for version in range(1, PHASES + 1):
        known.learn(windows(1e-5, 1e-4, 10), version, drafted=False)
    assert known.plain == windows(1e-5, 1e-4, 10 * PHASES)
    assert known.tolerance < 1e-4


@pytest.mark.parametrize(("version", "counts"), [(17, 0), (16, 2), (2, 2)])
def test_law_3_a_control_group_of_long_ago_has_no_say(version, counts):
    known = reference("float32")
    known.learn(windows(1.0, 9.0, 2), 0, drafted=True)
    assert len(known.control(Windows(), version)) == counts


def test_law_3_a_phase_without_drafts_is_no_control_group():
    known = reference("float32")
    known.learn(windows(1e-5, 1e-4), 0, drafted=False)
    known.learn(windows(1.0, 9.0, 2), 1, drafted=True)
    assert known.control(Windows(), 2) == windows(1.0, 9.0, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_law_3_what_plain_text_of_another_dtype_showed_says_nothing_after_a_resume(dtype, tmp_path):
    def guard(of: str) -> ProvenanceGuard:
        out = ProvenanceGuard()
        out.spec_configure(SpecConfig(), TargetInfo(path="", hf_config={}, dtype=of, actor_dtype=of))
        return out

    saved, resumed = guard("bfloat16"), guard(dtype)
    saved._reference(0).learn(windows(0.01, 0.5), 3, drafted=False)
    saved.spec_save(tmp_path)
    resumed.spec_load(tmp_path)
    assert len(resumed._reference(0).plain) == (32 if dtype == "bfloat16" else 0)


def test_the_level_is_that_of_both_looks_at_the_windows_together():
    """One value above nine others: 1 of 10 by chance, and it is looked at twice."""
    assert exceedance_test([5.0], [1.0] * 9, 1.0, 0.0)[0] == pytest.approx(0.2)
