"""Asynchronous training: text is judged by how many policy versions lie between sampling and recomputation of each token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.batches import with_drafts
from builders.provenance import guard, heavy_tailed, refusal, simulated

from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import Drafts, LogprobBatch, disputed
from spec_plugin.policy.provenance import by_lag

SEQUENCES, TOKENS = 64, 200
CUT = 120  # tokens that were sampled before the weight sync


def lagging(
    generator: torch.Generator, version: int, drift: float, fault: float = 1.0, fault_now: float = 1.0
) -> LogprobBatch:
    """Each response was cut short by a weight sync: first part a version old, the rest this one's; six have plain stretches.

    Args:
        generator: of everything.
        version: that recomputes.
        drift: mean |difference| of the older part, in nats; rounding is 0.005.
        fault: drafted text of the older part is so many times as far off as plain text.
        fault_now: the same of the newer part.
    """
    old = heavy_tailed(generator, SEQUENCES, CUT, drift)
    new = heavy_tailed(generator, SEQUENCES, TOKENS - CUT, 0.005)
    plain = torch.zeros(SEQUENCES, TOKENS, dtype=torch.bool)
    plain[:6, 20:84] = plain[6:12, 130:194] = True
    found = torch.cat([old, new], -1)
    found[:, :CUT] *= torch.where(plain[:, :CUT], 1.0, fault)
    found[:, CUT:] *= torch.where(plain[:, CUT:], 1.0, fault_now)
    versions = torch.full((SEQUENCES, TOKENS), version)
    versions[:, :CUT] -= 1
    batch = simulated(found, version, plain=plain)
    return replace(batch, lag_allowed=True, versions=versions)


def one_step_old(batch: LogprobBatch) -> LogprobBatch:
    versions = torch.full(batch.mask.shape, batch.policy_version - 1)
    return replace(batch, lag_allowed=True, versions=versions)


def warmed(generator: torch.Generator) -> tuple[object, int]:
    """A guard that has seen six phases, in which the policy moved more and less."""
    checked = guard("bfloat16")
    for version in range(1, 7):
        checked.spec_check_logprobs(lagging(generator, version, 0.01 * 2 ** (version % 3)))
    return checked, 7


def test_tokens_are_split_by_lag():
    batch = lagging(torch.Generator().manual_seed(0), 5, 0.02)
    parts = dict(by_lag(batch))
    assert sorted(parts) == [0, 1]
    assert parts[0].mask[:, CUT:].all() and not parts[0].mask[:, :CUT].any()
    assert (parts[0].mask ^ parts[1].mask).all()


def test_what_is_unknown_counts_as_old_as_what_is_known_of_its_sequence_or_as_one_version():
    batch = lagging(torch.Generator().manual_seed(0), 5, 0.02)
    ends = torch.full((SEQUENCES, TOKENS), -1)
    ends[:, 0], ends[:, -1] = 2, 5  # as a trainer tells it that knows the first and the last one
    parts = dict(by_lag(replace(batch, versions=ends)))
    assert sorted(parts) == [0, 3] and parts[0].mask.sum(-1).tolist() == [1] * SEQUENCES
    unknown = replace(batch, versions=torch.full((SEQUENCES, TOKENS), -1))
    assert [lag for lag, _ in by_lag(unknown)] == [1]


def test_the_mean_lag_is_a_metric():
    checked = guard("bfloat16")
    checked.spec_check_logprobs(lagging(torch.Generator().manual_seed(0), 5, 0.02))
    assert checked.spec_metrics()["spec/policy_lag"] == pytest.approx(CUT / TOKENS)


def test_a_correct_run_is_not_stopped_however_the_policy_moves():
    """Steps that move it between nothing and a hundred times as far, 15 runs of 12 phases."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(15):
        checked = guard("bfloat16")
        for version in range(1, 13):
            drift = 0.005 * 100 ** float(torch.rand((), generator=generator))
            checked.spec_check_logprobs(lagging(generator, version, drift, fault=1.3, fault_now=1.3))
        assert checked.spec_metrics()["spec/logprob_alarms"] == 0


@pytest.mark.parametrize("fault", [15.0, 30.0])
def test_law_3_drafted_text_that_is_further_off_than_plain_text_of_its_own_lag_is_refused(fault):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        checked, version = warmed(generator)
        assert "not the target's" in refusal(lagging(generator, version, 0.02, fault=fault), checked)


def test_law_3_text_of_the_recomputing_policy_is_judged_as_in_synchronous_training():
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        checked, version = warmed(generator)
        assert "not the target's" in refusal(lagging(generator, version, 0.02, fault_now=6.0), checked)


def test_a_jump_that_plain_text_shows_too_is_no_fault_where_the_policy_has_moved():
    generator = torch.Generator().manual_seed(3)
    checked, version = warmed(generator)
    checked.spec_check_logprobs(lagging(generator, version, 0.5))


def without_control(batch: LogprobBatch) -> LogprobBatch:
    return replace(batch, drafted=with_drafts(batch.mask, Drafts.ON))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_step_is_no_fault_in_whatever_precision(dtype):
    """As a real run in float32 had it: 0.09 nats from one version to the next, no plain text in the batch."""
    generator = torch.Generator().manual_seed(7)
    checked = guard(dtype)
    for version in range(1, 6):
        old = heavy_tailed(generator, SEQUENCES, TOKENS, 0.01 if version == 3 else 0.09)
        batch = simulated(old, version, plain=torch.zeros(SEQUENCES, TOKENS, dtype=torch.bool))
        checked.spec_check_logprobs(one_step_old(batch))


@pytest.mark.parametrize(("drift", "refused"), [(0.1, False), (0.15, False), (0.6, True)])
def test_law_3_text_without_plain_text_beside_it_is_held_against_other_steps(drift, refused):
    generator = torch.Generator().manual_seed(8)
    checked, version = warmed(generator)
    batch = without_control(lagging(generator, version, drift))
    batch = replace(batch, mask=batch.mask & (batch.versions < version))
    if refused:
        assert "not the target's" in refusal(batch, checked)
    else:
        checked.spec_check_logprobs(batch)


def test_law_3_another_model_is_refused_at_any_lag():
    batch = lagging(torch.Generator().manual_seed(4), 5, 0.02)
    assert batch.rollout is not None
    wrong = replace(batch, rollout=torch.full_like(batch.rollout, -500.0 - 10.0))
    assert "not the target's" in refusal(wrong, guard("bfloat16"))


def test_law_3_text_of_a_later_version_is_refused():
    batch = lagging(torch.Generator().manual_seed(5), 5, 0.02)
    message = refusal(replace(batch, versions=batch.versions + 1), guard("bfloat16"))
    assert "A later version than the trainer's" in message and "sequence 0 by version 5 to 6" in message


def test_law_3_versions_that_engine_and_trainer_do_not_agree_on_are_refused():
    batch = lagging(torch.Generator().manual_seed(5), 5, 0.02)
    versions = batch.versions.clone()
    versions[1, 7] = disputed(versions[1, 7])
    message = refusal(replace(batch, versions=versions), guard("bfloat16"))
    assert "name different versions" in message and "1 of 64 sequences" in message
    assert "sequence 1 by version 4 to 5" in message


def test_a_resumed_run_knows_what_plain_text_of_each_lag_showed(tmp_path):
    generator = torch.Generator().manual_seed(6)
    checked, version = warmed(generator)
    checked.spec_save(tmp_path)
    after = guard("bfloat16")
    after.spec_load(tmp_path)
    assert "not the target's" in refusal(lagging(generator, version, 0.02, fault=20.0), after)


def power(fault: float, runs: int = 20) -> float:
    """Share of runs in which one batch with this fault is refused."""
    seen = 0
    for seed in range(runs):
        generator = torch.Generator().manual_seed(100 + seed)
        checked, version = warmed(generator)
        try:
            checked.spec_check_logprobs(lagging(generator, version, 0.02, fault=fault))  # type: ignore[attr-defined]
        except Exception:
            seen += 1
    return seen / runs


def of_one_age(
    generator: torch.Generator, version: int, drift: float, drafted: float, control: int, sequences: int = 32
) -> LogprobBatch:
    """As one step off has it: all text is one version old, and so many sequences have a plain stretch of 64 tokens."""
    found = heavy_tailed(generator, sequences, TOKENS, drift)
    plain = torch.zeros(sequences, TOKENS, dtype=torch.bool)
    plain[:control, 60:124] = True
    found = found + torch.where(plain, 0.0, drafted)
    return one_step_old(simulated(found, version, plain=plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_law_3_the_first_batch_with_a_lag_is_judged_by_the_plain_text_in_it(dtype):
    """0.8 nats a token is no more than a step may do; here the plain text says that this one did less."""
    for seed in range(10):
        generator, checked = torch.Generator().manual_seed(seed), guard(dtype)
        assert "not the target's" in refusal(of_one_age(generator, 1, 0.01, 0.8, control=6), checked)
        checked = guard(dtype)
        for version in range(1, 9):
            checked.spec_check_logprobs(of_one_age(generator, version, 0.01 * 3 ** (version % 3), 0.0, control=6))


def test_law_3_the_control_group_of_all_micro_batches_of_a_step_counts_for_each_of_them():
    generator, checked = torch.Generator().manual_seed(2), guard("bfloat16")
    wrong = [of_one_age(generator, 1, 0.01, 0.8, control=1, sequences=8) for _ in range(7)]
    with pytest.raises(LogprobProvenanceError, match="not the target's"):
        for batch in wrong:
            checked.spec_check_logprobs(batch)


def test_law_3_drafted_text_that_waits_to_be_judged_is_not_put_together_with_that_of_another_step():
    """Six sequences each time, too few to be judged; the policy has moved in between, by a hundred times as much once."""
    generator, checked = torch.Generator().manual_seed(2), guard("bfloat16")
    for version in range(1, 5):
        batch = of_one_age(generator, version, 0.005 if version % 2 else 0.5, 0.0, control=0, sequences=6)
        checked.spec_check_logprobs(batch)
    version, waiting = checked._reference(1)._unjudged
    assert version == 4 and len(waiting) == 12
