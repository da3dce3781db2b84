"""The bounds of the guard where a run has no plain text, and how much of it the baseline keeps."""

from __future__ import annotations

import pytest

from spec_plugin import SpecConfig
from spec_plugin.builtin.provenance.windows import Windows, compared
from spec_plugin.builtin.provenance.reference import KEPT, PHASES, Baseline
from spec_plugin.builtin.provenance import ProvenanceGuard
from spec_plugin.events import TargetInfo


def baseline(dtype: str) -> Baseline:
    return Baseline(TargetInfo(path="", hf_config={}, dtype=dtype, actor_dtype=dtype))


def windows(mean: float, largest: float, count: int = 32) -> Windows:
    return Windows((mean,) * count, (largest,) * count)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [("float32", 2e-3, 0.05), ("float16", 3e-2, 1.0), ("bfloat16", 0.1, 3.0)]
)
def test_law_3_without_plain_text_drafted_text_may_differ_by_what_correct_runs_show_and_no_more(dtype, mean, largest):
    """Means of correct bfloat16 runs are 5e-3 to 4e-2 nats, single tokens beyond 1."""
    judge = baseline(dtype)
    assert judge.too_far(windows(0.9 * mean, 0.9 * largest), Windows(), 0) is None
    for found in (windows(1.1 * mean, 0.9 * largest), windows(0.1 * mean, 1.1 * largest)):
        assert judge.too_far(found, Windows(), 0) is not None
    assert judge.far == largest and judge.tolerance == mean


def test_no_phase_of_plain_text_outweighs_the_others():
    judge = baseline("float32")
    judge.remember(1, 0, windows(1e-5, 1e-4, 5 * KEPT), drafted=False)
    for _ in range(3):
        judge.remember(2, 0, windows(1e-5, 1e-4, KEPT), drafted=False)
    assert len(judge.past(0)) == 2 * KEPT == len(judge.past(0).maxima)


def test_what_plain_text_showed_long_ago_is_forgotten():
    judge = baseline("float32")
    judge.remember(0, 0, windows(1e-3, 0.01), drafted=False)
    for version in range(1, PHASES + 1):
        judge.remember(version, 0, windows(1e-5, 1e-4, 10), drafted=False)
    assert judge.past(0) == windows(1e-5, 1e-4, 10 * PHASES)
    assert judge.tolerance < 1e-4


@pytest.mark.parametrize(("version", "counts"), [(17, 0), (16, 2), (2, 2)])
def test_law_3_a_control_group_of_long_ago_has_no_say(version, counts):
    judge = baseline("float32")
    judge.remember(0, 0, windows(1.0, 9.0, 2), drafted=True)
    assert len(judge.control(Windows(), version, 0)) == counts


def test_law_3_a_phase_without_drafts_is_no_control_group():
    judge = baseline("float32")
    judge.remember(0, 0, windows(1e-5, 1e-4), drafted=False)
    judge.remember(1, 0, windows(1.0, 9.0, 2), drafted=True)
    assert judge.control(Windows(), 2, 0) == windows(1.0, 9.0, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_law_3_what_plain_text_of_another_dtype_showed_says_nothing_after_a_resume(dtype, tmp_path):
    def guard(of: str) -> ProvenanceGuard:
        out = ProvenanceGuard()
        out.spec_configure(SpecConfig(), TargetInfo(path="", hf_config={}, dtype=of, actor_dtype=of))
        return out

    saved, resumed = guard("bfloat16"), guard(dtype)
    saved._baseline.remember(3, 0, windows(0.01, 0.5), drafted=False)
    saved.spec_save(tmp_path)
    resumed.spec_load(tmp_path)
    assert len(resumed._baseline.past(0)) == (32 if dtype == "bfloat16" else 0)


def test_the_level_is_that_of_both_looks_at_the_windows_together():
    """One value above nine others: 1 of 10 by chance, and it is looked at twice."""
    assert compared([5.0], [1.0] * 9, 1.0, 0.0).p_value == pytest.approx(0.2)
