from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from builders.batches import batch_of
from builders.provenance import VERSION, at, guard, heavy_tailed, plain, refusal, simulated
from torch import Tensor

from spec_plugin import LogprobProvenanceError, SpecConfig
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo
from spec_plugin.policy.provenance import ProvenanceGuard

B, T, V = 16, 24, 40


class TinyLM(torch.nn.Module):
    """Predicts the next token from the current one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(V, 16)
        self.head = torch.nn.Linear(16, V)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[B, T + 1] ids -> [B, T] log-probs of each next token."""
        logits = self.head(self.embed(tokens[:, :-1]))
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def policy() -> TinyLM:
    return TinyLM(seed=1)


@pytest.fixture
def honest(policy, tokens) -> LogprobBatch:
    """What a correct run shows: the same model twice, in float32, responses of different lengths."""
    with torch.no_grad():
        recomputed = policy.logprobs(tokens)
    noise = 1e-5 * torch.randn(B, T, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(T)[None] < torch.arange(T - B + 1, T + 1)[:, None]
    return batch_of(VERSION, recomputed, (recomputed + noise).clamp_max(0), mask)


def changed(values: Tensor, at: tuple[int, int], to: float) -> Tensor:
    out = values.clone()
    out[at] = to
    return out


def sampled_by(batch: LogprobBatch, version: int, column: int | slice = slice(None)) -> LogprobBatch:
    """The sixth sequence is, from here on or in one place, of another version."""
    versions = batch.versions.clone()
    versions[6, column] = version
    return replace(batch, versions=versions)


def noisy(batch: LogprobBatch, scale: float, seed: int = 4) -> LogprobBatch:
    noise = scale * torch.randn(B, T, generator=torch.Generator().manual_seed(seed))
    return replace(batch, recomputed=batch.recomputed - 30, rollout=batch.recomputed - 30 + noise)


def test_law_3_an_honest_batch_passes_and_is_measured(honest):
    checked = guard()
    checked.spec_check_logprobs(honest)
    metrics = checked.spec_metrics()
    assert 0 < metrics["spec/logprob_diff_mean"] < metrics["spec/logprob_diff_p9999"] < 1e-4
    assert metrics["spec/logprob_diff_p9999"] <= metrics["spec/logprob_diff_max"] < 1e-4
    assert metrics["spec/logprob_tolerance"] == 2e-3 and "spec/logprob_diff_plain" not in metrics
    checked.spec_check_logprobs(plain(honest))
    metrics = checked.spec_metrics()
    assert metrics["spec/logprob_diff_plain"] == pytest.approx(8e-6, rel=0.3)  # the mean of |N(0, 1e-5)|
    assert 2e-5 < metrics["spec/logprob_tolerance"] < 6e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5])
@pytest.mark.parametrize("source", ["rollout", "recomputed"])
def test_law_3_one_impossible_value_is_refused_with_sequence_position_and_value(honest, source, value):
    batch = replace(honest, **{source: changed(getattr(honest, source), (5, 3), value)})
    message = refusal(batch)
    assert f"{source} log-probs" in message
    assert f"sequence 5 position 3 {source}={value:.4f}" in message


def test_law_3_nan_is_refused_where_log_probs_are_not_comparable_too(honest):
    batch = replace(honest, rollout=changed(honest.rollout, (5, 3), float("nan")))
    assert "sequence 5 position 3" in refusal(batch, guard(sampling={"top_p": 0.9}))


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 3.0, -99.0])
@pytest.mark.parametrize("source", ["rollout", "recomputed", "both"])
def test_masked_positions_are_ignored(honest, source, junk):
    names = ("rollout", "recomputed") if source == "both" else (source,)
    batch = replace(honest, **{n: getattr(honest, n).masked_fill(~honest.mask, junk) for n in names})
    guard().spec_check_logprobs(batch)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_law_3_junk_at_masked_positions_hides_no_violation(honest, policy, tokens, junk):
    with torch.no_grad():
        other = TinyLM(seed=9).logprobs(tokens)
    batch = replace(honest, rollout=other.masked_fill(~honest.mask, junk))
    assert "not the target's" in refusal(batch)


def test_law_3_log_probs_of_the_draft_are_refused(honest, tokens):
    with torch.no_grad():
        draft = TinyLM(seed=9).logprobs(tokens)
    message = refusal(replace(honest, rollout=draft))
    assert f"not the target's at policy version {VERSION}" in message
    found = re.search(r"sequence (\d+) position (\d+) rollout=(-?[\d.]+) recomputed=(-?[\d.]+)", message)
    assert found
    b, t = int(found[1]), int(found[2])
    assert float(found[3]) == pytest.approx(float(draft[b, t]), abs=1e-4)
    assert float(found[4]) == pytest.approx(float(honest.recomputed[b, t]), abs=1e-4)


def test_law_3_log_probs_of_the_previous_policy_version_are_refused(honest, policy, tokens):
    with torch.no_grad():
        stale = policy.logprobs(tokens)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    (-policy.logprobs(tokens).mean()).backward()
    optimizer.step()
    with torch.no_grad():
        fresh = policy.logprobs(tokens)
    guard().spec_check_logprobs(replace(honest, recomputed=fresh, rollout=fresh.clone()))
    assert "not the target's" in refusal(replace(honest, recomputed=fresh, rollout=stale))


def test_law_3_log_probs_of_a_sync_that_was_rounded_are_refused_where_the_run_showed_that_it_can_do_better(
    honest, policy, tokens
):
    exact = replace(honest, rollout=(honest.recomputed * (1 + 3e-7)).clamp_max(0))
    for parameter in policy.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        rounded = replace(honest, rollout=policy.logprobs(tokens))
    assert (rounded.rollout - honest.recomputed).abs()[
        honest.mask
    ].mean() < 2e-3  # a bound for all runs would not see it
    guard().spec_check_logprobs(rounded)
    checked = guard()
    checked.spec_check_logprobs(plain(exact))
    checked.spec_check_logprobs(exact)
    assert "not the target's" in refusal(rounded, checked)


def test_law_3_one_long_sequence_beyond_anything_is_refused_and_named(honest, tokens):
    tensors = ("recomputed", "rollout", "mask", "versions", "drafted")
    wide = replace(honest, **{n: torch.cat([getattr(honest, n)] * 3, -1) for n in tensors})
    rollout = wide.rollout.clone()
    rollout[11] -= 0.04
    message = refusal(replace(wide, rollout=rollout))
    assert "mean difference of a sequence" in message and "sequence 11 position 0" in message
    rollout[11] += 0.02
    guard().spec_check_logprobs(replace(wide, rollout=rollout))  # odd, and alone


def test_single_tokens_and_short_sequences_stop_no_run(honest):
    rollout = honest.rollout.clone()
    rollout[12, 2] -= 20.0
    rollout[0, :9] -= 5.0
    mask = honest.mask.clone()
    mask[0, 9:] = False
    checked = guard("bfloat16")
    checked.spec_check_logprobs(plain(noisy(honest, 0.01)))
    checked.spec_check_logprobs(replace(honest, rollout=rollout, mask=mask))
    assert checked.spec_metrics()["spec/logprob_far"] == pytest.approx(10 / int(mask.sum()))


def test_law_3_single_tokens_that_are_far_off_in_many_sequences_are_refused(honest):
    rollout = honest.rollout.clone()
    rollout[:, 4] -= (
        0.02  # the mean of a window stays below 2e-3, which is all that is known of a run without plain text
    )
    guard().spec_check_logprobs(replace(honest, rollout=rollout))
    checked = guard()
    for version in range(3):
        checked.spec_check_logprobs(plain(honest, version))
    assert "in 16 of" in refusal(replace(honest, rollout=rollout), checked)


@pytest.mark.parametrize("wrong", [VERSION - 1, VERSION + 1, 0])
def test_law_3_a_sequence_of_another_policy_version_is_refused_with_both_versions(honest, wrong):
    message = refusal(sampled_by(honest, wrong))
    assert f"sequence 6 by version {wrong}" in message and f"policy version {VERSION}" in message


@pytest.mark.parametrize("wrong", [VERSION - 1, VERSION + 1])
def test_law_3_a_sequence_that_another_version_has_ended_is_refused(honest, wrong):
    (*_, last) = honest.mask[6].nonzero().flatten().tolist()
    message = refusal(sampled_by(honest, wrong, last))
    low, high = sorted((VERSION, wrong))
    assert f"sequence 6 by version {low} to {high}" in message and "synchronous" in message


def test_an_unknown_policy_version_is_left_to_the_comparison(honest):
    guard().spec_check_logprobs(replace(honest, versions=torch.full((B, T), -1)))


def test_noise_as_bfloat16_makes_it_is_accepted_in_bfloat16_only(honest):
    generator = torch.Generator().manual_seed(3)
    noise = 0.012 * torch.randn(B, T, generator=generator)
    noise[2, 2] = 0.4  # single tokens scatter far more than the mean
    batch = replace(honest, rollout=(honest.recomputed + noise).clamp_max(0))
    guard("bfloat16").spec_check_logprobs(batch)
    assert "not the target's" in refusal(batch)


@pytest.mark.parametrize(
    ("rollout", "actor"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")]
)
def test_the_coarser_of_the_two_dtypes_decides(honest, rollout, actor):
    checked = ProvenanceGuard()
    checked.spec_configure(SpecConfig(), TargetInfo(path="", hf_config={}, dtype=rollout, actor_dtype=actor))
    checked.spec_check_logprobs(noisy(honest, 0.05))
    assert checked.spec_metrics()["spec/logprob_tolerance"] == 0.1


def test_what_is_allowed_scales_with_one_over_the_temperature(honest):
    checked = guard("bfloat16", sampling={"temperature": 0.25})
    checked.spec_check_logprobs(noisy(honest, 0.4))
    assert checked.spec_metrics()["spec/logprob_tolerance"] == pytest.approx(0.4)
    assert "not the target's" in refusal(noisy(honest, 0.4), guard("bfloat16"))


def test_phases_without_drafts_are_warned_of_and_never_stopped(honest, caplog):
    checked = guard()
    checked.spec_check_logprobs(plain(honest, 0))
    assert not caplog.records
    for version in (1, 2):
        checked.spec_check_logprobs(plain(noisy(honest, 0.5), version))
    assert [r.message.count("without drafts, too") for r in caplog.records] == [1, 1], "each of them is said"
    assert "sequence 0 position 0" in caplog.records[0].message
    assert checked.spec_metrics()["spec/logprob_alarms"] == 2


@pytest.mark.parametrize("source", ["rollout", "recomputed"])
def test_law_3_what_is_no_number_stops_phases_without_drafts_too(honest, source):
    batch = plain(replace(honest, **{source: changed(getattr(honest, source), (5, 3), float("nan"))}))
    assert "sequence 5 position 3" in refusal(batch)


@pytest.mark.parametrize("speculating", [True, False])
def test_only_plain_text_moves_what_is_allowed(honest, speculating):
    checked = guard()
    for version in range(3):
        batch = noisy(honest, 1e-3, version)
        checked.spec_check_logprobs(at(batch, version) if speculating else plain(batch, version))
    tolerance = checked.spec_metrics()["spec/logprob_tolerance"]
    assert tolerance == 2e-3 if speculating else 2e-3 < tolerance < 5e-3


def controlled(batch: LogprobBatch, sequences: int = 6) -> LogprobBatch:
    """A batch whose first sequences were sampled without drafts."""
    rows = torch.zeros_like(batch.mask)
    rows[:sequences] = True
    return replace(batch, drafted=torch.where(rows, Drafts.CONTROL, batch.drafted))


def test_differences_that_the_control_group_shows_too_are_drift(honest):
    checked = guard("bfloat16")
    checked.spec_check_logprobs(plain(noisy(honest, 0.01)))
    drifted = noisy(honest, 0.06)
    assert "not the target's" in refusal(drifted, checked)
    checked.spec_check_logprobs(controlled(drifted))
    only_drafted = replace(drifted, rollout=drifted.rollout.clone())
    only_drafted.rollout[:6] = only_drafted.recomputed[:6] + 0.01
    checked = guard("bfloat16")
    checked.spec_check_logprobs(plain(noisy(honest, 0.01)))
    assert "not the target's" in refusal(controlled(only_drafted), checked)


def test_law_3_a_jump_is_no_drift_although_the_control_group_shows_it(honest):
    checked = guard("bfloat16")
    checked.spec_check_logprobs(plain(noisy(honest, 0.01)))
    assert "not the target's" in refusal(controlled(noisy(honest, 0.5)), checked)


def test_the_control_group_is_the_baseline_of_a_run_that_always_drafts(honest):
    checked = guard()
    for version in range(4):
        checked.spec_check_logprobs(at(controlled(noisy(honest, 1e-6, version)), version))
    assert checked.spec_metrics()["spec/logprob_tolerance"] == pytest.approx(1e-5)
    assert "not the target's" in refusal(controlled(noisy(honest, 1e-3)), checked)


def test_a_control_group_of_one_request_a_phase_is_remembered(honest):
    checked = guard("bfloat16")
    checked.spec_check_logprobs(plain(noisy(honest, 0.01), 0))
    for version in range(1, 6):
        batch = controlled(noisy(honest, 0.01 * 1.4**version, version), sequences=1)
        checked.spec_check_logprobs(at(batch, version))
    assert checked.spec_metrics()["spec/logprob_alarms"] == 0


@pytest.mark.parametrize("pieces", [1, 16])
def test_law_3_a_wrong_phase_without_drafts_does_not_teach_that_wrong_is_normal(pieces, tmp_path):
    """bfloat16, honest mean 0.016 nats; one plain phase is 0.4 off, in one batch or in micro-batches of eight responses."""
    generator, checked = torch.Generator().manual_seed(3), guard("bfloat16")

    def phase(version: int, mean: float, speculating: bool) -> None:
        found = heavy_tailed(generator, 128, 200, mean)
        for part in found.chunk(pieces):
            checked.spec_check_logprobs(simulated(part, version, speculating))

    for version in range(3):
        phase(version, 0.016, speculating=False)
    before = checked._reference(0).state()
    phase(3, 0.4, speculating=False)
    assert checked.spec_metrics()["spec/logprob_alarms"] == 1
    assert checked._reference(0).state() == before, "nothing of it is kept, and a checkpoint holds nothing of it either"
    phase(4, 0.4, speculating=False)
    assert checked.spec_metrics()["spec/logprob_alarms"] == 2, "the next one is as wrong"
    phase(5, 0.016, speculating=True)
    phase(6, 0.016, speculating=False)
    assert len(checked._reference(0).state()) == len(before) + 1, "a correct phase behind it is kept"
    checked.spec_save(tmp_path)
    resumed = guard("bfloat16")
    resumed.spec_load(tmp_path)
    for by in (checked, resumed):
        for mean in (0.4, 0.8):
            assert "not the target's" in refusal(simulated(heavy_tailed(generator, 128, 200, mean), 7), by)


def test_law_3_a_wrong_phase_that_is_the_first_is_no_measure_either():
    generator, checked = torch.Generator().manual_seed(4), guard("bfloat16")
    checked.spec_check_logprobs(simulated(heavy_tailed(generator, 64, 200, 0.6), 0, speculating=False))
    assert checked.spec_metrics()["spec/logprob_alarms"] == 1
    assert "not the target's" in refusal(simulated(heavy_tailed(generator, 64, 200, 0.6), 1), checked)


def test_few_sequences_are_judged_together_with_the_next(honest):
    checked, batch = guard(), noisy(honest, 0.02).of(torch.arange(B)[-3:])
    checked.spec_check_logprobs(batch)
    checked.spec_check_logprobs(batch)
    assert "in 18 of 18 stretches" in refusal(batch, checked)


def test_a_resumed_run_knows_what_plain_text_showed(honest, tmp_path):
    before = guard()
    before.spec_check_logprobs(plain(honest))
    before.spec_save(tmp_path)
    for after, known in ((guard(), True), (guard("bfloat16"), False), (guard(sampling={"temperature": 0.5}), False)):
        after.spec_load(tmp_path)
        after.spec_check_logprobs(honest)
        assert ("spec/logprob_diff_plain" in after.spec_metrics()) == known
    guard().spec_load(tmp_path / "missing")


def test_the_users_own_tolerance_replaces_dtype_and_baseline(honest):
    batch = replace(honest, rollout=honest.recomputed - 5e-3)
    guard(logprob_tolerance=0.01).spec_check_logprobs(batch)
    guard(logprob_tolerance=float("inf")).spec_check_logprobs(noisy(honest, 5.0))
    strict = guard(logprob_tolerance=1e-4)
    off = replace(honest, rollout=honest.recomputed - 2e-4)
    assert "beyond 0.0001" in refusal(off, strict)
    strict.spec_check_logprobs(plain(off))


@pytest.mark.parametrize("sampling", [{"top_p": 0.9, "top_k": -1}, {"top_p": 1.0, "top_k": 20}])
def test_law_3_rollout_log_probs_of_a_truncated_distribution_may_not_enter_the_loss(honest, sampling):
    message = refusal(replace(honest, rollout_in_loss=True), guard(sampling=sampling))
    assert f"top_p={sampling['top_p']}" in message and f"top_k={sampling['top_k']}" in message
    guard(sampling=sampling).spec_check_logprobs(replace(honest, rollout_in_loss=False))


def test_without_rollout_log_probs_the_recomputed_ones_are_still_checked(honest):
    guard().spec_check_logprobs(replace(honest, rollout=None))
    bad = changed(honest.recomputed, (0, 0), float("nan"))
    assert "sequence 0 position 0" in refusal(replace(honest, rollout=None, recomputed=bad))


def test_a_batch_without_sampled_tokens_passes(honest):
    empty = replace(honest, mask=torch.zeros_like(honest.mask))
    guard().spec_check_logprobs(empty)


def test_only_the_first_violations_are_shown(honest):
    message = refusal(replace(honest, rollout=torch.full((B, T), float("nan"))))
    assert message.count("position") == 3 and f"{int(honest.mask.sum())} of {int(honest.mask.sum())}" in message


# ---- simulated runs: how often a correct one is stopped, and what is seen of a wrong one


def test_five_million_tokens_with_heavy_tails_are_not_stopped():
    generator, checked = torch.Generator().manual_seed(0), guard("bfloat16")
    total, beyond = 0.0, 0
    for version in range(20):
        found = heavy_tailed(generator, 250, 1000)
        total, beyond = total + float(found.abs().mean()) / 20, beyond + int((found.abs() > 3).sum())
        checked.spec_check_logprobs(simulated(found, version, speculating=version > 0))
        assert checked.spec_metrics()["spec/logprob_alarms"] == 0
    assert total == pytest.approx(0.02, rel=0.1) and 5 <= beyond <= 100


def test_law_3_single_wrong_tokens_are_seen_although_they_move_no_mean():
    generator, checked = torch.Generator().manual_seed(5), guard("bfloat16")
    for version in range(3):
        checked.spec_check_logprobs(simulated(heavy_tailed(generator, 128, 300), version, speculating=False))
    found = heavy_tailed(generator, 128, 300)
    found += 2.5 * (torch.rand(found.shape, generator=generator) < 0.012)  # 2 of 3 windows have one
    assert "the largest difference in" in refusal(simulated(found, 3), checked)


@pytest.mark.parametrize(("sequences", "tokens"), [(16, 40), (4, 30), (64, 200)])
def test_small_batches_are_not_stopped_either(sequences, tokens):
    """Though drafted text is 1.5 times as far off as plain text, in each of 100 runs of 5 phases."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(100 if tokens < 100 else 30):
        checked = guard("bfloat16")
        for version in range(5):
            found = heavy_tailed(generator, sequences, tokens) * (1.5 if version else 1.0)
            checked.spec_check_logprobs(simulated(found, version, speculating=version > 0))


@pytest.mark.parametrize("control", [True, False])
def test_drift_is_followed_where_the_control_group_shows_it(control):
    generator, checked = torch.Generator().manual_seed(2), guard("bfloat16")
    stopped = None
    for version in range(40):
        found = heavy_tailed(generator, 64, 300, mean=0.005 * 1.1**version)  # 41 times as far off in the end
        plain = torch.zeros_like(found, dtype=torch.bool)
        plain[:4, 64:128] = control
        try:
            checked.spec_check_logprobs(simulated(found, version, version > 0, plain))
        except LogprobProvenanceError:
            stopped = version
            break
    assert (stopped is None) == control


@pytest.mark.parametrize(
    ("fault", "share"),
    [
        (lambda d, g: d * 6, 1.0),  # another kernel's noise, six times as much
        (lambda d, g: d + 0.2, 0.5),  # half of the sequences are of another model
        (lambda d, g: d + 8 * (torch.rand(d.shape, generator=g) < 0.01), 1.0),  # one token of a hundred is wrong
    ],
)
def test_law_3_faults_of_a_bfloat16_run_are_seen_in_one_batch(fault, share):
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        checked = guard("bfloat16")
        checked.spec_check_logprobs(simulated(heavy_tailed(generator, 128, 300), 0, speculating=False))
        found = heavy_tailed(generator, 128, 300)
        rows = int(share * 128)
        found[:rows] = fault(found[:rows], generator)
        assert "not the target's" in refusal(simulated(found, 1), checked)


@pytest.mark.parametrize(("mean", "dtype", "said"), [(1e-3, "float32", 1), (1e-4, "float32", 0), (1e-3, "bfloat16", 0)])
@pytest.mark.parametrize("speculating", [False, True])
def test_law_3_a_sync_that_rounds_to_bfloat16_in_a_float32_run_is_named_once(mean, dtype, said, speculating, caplog):
    """From the first step on: nothing that was seen before is better, so no comparison shows it."""
    generator, checked = torch.Generator().manual_seed(9), guard(dtype)
    for version in range(20):
        plain = torch.zeros(64, 200, dtype=torch.bool)
        plain[:4] = True
        batch = simulated(heavy_tailed(generator, 64, 200, mean), version, speculating, plain if speculating else None)
        checked.spec_check_logprobs(batch)
    assert [r.getMessage().count("a weight sync that goes through bfloat16") for r in caplog.records] == [1] * said
