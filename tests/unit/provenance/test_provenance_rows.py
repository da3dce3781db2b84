"""Law 3: a few wrong rows in each batch stop a run, because the evidence of batches adds up; correct rows never do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.provenance import VERSION, guard, heavy_tailed, plain, simulated
from simulators import wrong_rows
from simulators.wrong_rows import ROWS, TOKENS

from spec_plugin import LogprobProvenanceError
from spec_plugin.api.events import LogprobBatch
from spec_plugin.policy.provenance import ProvenanceGuard, rules
from spec_plugin.policy.provenance.rows import RowEvidence, row_scores
from spec_plugin.policy.provenance.rules import Precision


def batch(seed: int, wrong: int = 0, nats: float = 0.05, version: int = VERSION) -> LogprobBatch:
    """64 rows of 200 tokens as of a bfloat16 run, of which the first ones are so many nats too high."""
    difference = heavy_tailed(torch.Generator().manual_seed(seed), ROWS, TOKENS)
    difference[:wrong] += nats
    return simulated(difference, version)


def knowing(phases: int = 1) -> ProvenanceGuard:
    """A guard that has seen plain phases."""
    out = guard("bfloat16")
    for version in range(phases):
        out.spec_check_logprobs(plain(batch(1000 + version), version))
    return out


def test_law_3_rows_that_are_a_little_off_in_each_batch_stop_the_run_after_some():
    by = knowing()
    with pytest.raises(
        LogprobProvenanceError, match=r"in \d+ of 64 sequences, as in batches before.*first at sequence [0-7] "
    ):
        for seed in range(10):
            by.spec_check_logprobs(batch(seed, wrong=8, version=VERSION + seed))


def test_one_such_batch_alone_is_no_evidence():
    knowing().spec_check_logprobs(batch(0, wrong=8))


def test_what_adds_up_is_kept_in_a_checkpoint(tmp_path):
    by = knowing()
    for seed in range(4):
        by.spec_check_logprobs(batch(seed, wrong=8))
    by.spec_save(tmp_path)
    resumed = guard("bfloat16")
    resumed.spec_load(tmp_path)
    assert resumed._rows.state() == by._rows.state()
    assert resumed._rows.capital > 1e3


def test_rows_as_wrong_in_plain_text_stop_nothing():
    by = guard("bfloat16")
    for seed in range(5):
        by.spec_check_logprobs(plain(batch(seed, wrong=8), seed))
    for seed in range(12):
        by.spec_check_logprobs(batch(seed, wrong=8, version=VERSION + seed))


def test_without_plain_text_nothing_is_bet():
    by = guard("bfloat16")
    for seed in range(12):
        by.spec_check_logprobs(batch(seed, wrong=8, version=VERSION + seed))
    assert by._rows.capital == 0.0


def test_a_move_of_the_policy_is_no_evidence():
    by = knowing()
    for seed in range(8):
        late = batch(seed, wrong=8, version=VERSION + seed)
        by.spec_check_logprobs(at_lag(late))
    assert by._rows.capital == 0.0


def at_lag(of: LogprobBatch) -> LogprobBatch:
    return replace(of, versions=of.versions - 1, lag_allowed=True)


def test_micro_batches_wait_until_there_are_enough_rows_for_a_median():
    evidence, whole = RowEvidence(Precision("bfloat16", 1.0)), batch(0)
    assert whole.rollout is not None
    evidence.learn(whole.recomputed, whole.rollout, whole.mask)
    for begin in range(0, 8, 4):
        rows = slice(begin, begin + 4)
        evidence.judge(whole.recomputed[rows], whole.rollout[rows], whole.mask[rows])
        assert (evidence.capital > 0.0) == (begin == 4)


def test_scores_know_no_tails_and_no_padding():
    generator = torch.Generator().manual_seed(0)
    lp = -torch.rand(32, 100, generator=generator)
    d = heavy_tailed(generator, 32, 100)
    mask = torch.ones(32, 100, dtype=torch.bool)
    mask[::2, 60:] = False
    mask[0, 20:] = False  # too short to be scored
    scores, rows = row_scores(lp, lp + d, mask)
    assert rows.tolist() == list(range(1, 32))
    torch.testing.assert_close(scores, row_scores(lp, (lp + d).masked_fill(~mask, 77.0), mask)[0])
    assert float(scores[1:].max()) < 4.0
    steady, _ = row_scores(lp, lp + d + 0.1, mask)
    tilted, _ = row_scores(lp, lp + d + 0.2 * (lp < -0.5), mask)
    assert float(steady[1].median()) > 5.0 > float(steady[2].median())
    assert float(tilted[2].median()) > 5.0


@pytest.mark.parametrize("fault", [1, 2], ids=lambda index: wrong_rows.FAULTS[index][0])
def test_law_3_a_fault_in_a_fourth_of_the_rows_is_stopped_within_ten_phases(fault):
    assert wrong_rows.run(16, fault, seed=10_000) is not None


def test_a_correct_run_never_comes_near():
    assert wrong_rows.highest(seed=3, phases=40) < 0.01 / rules.ERROR_LEVEL
