from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spec_plugin import LogprobProvenanceError, SpecConfig
from spec_plugin.events import LogprobBatch, TargetInfo
from spec_plugin.provenance import ProvenanceGuard, Tolerance, agreement

B, T, V = 16, 24, 40
VERSION = 7


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
    versions = torch.full((B,), VERSION)
    return LogprobBatch(VERSION, recomputed, (recomputed + noise).clamp_max(0), mask, versions, True, False)


def guard(dtype: str = "float32", sampling: dict[str, float] | None = None, **options: object) -> ProvenanceGuard:
    out = ProvenanceGuard()
    target = TargetInfo(path="", hf_config={}, dtype=dtype, actor_dtype=dtype, sampling=sampling or {})
    out.spec_configure(SpecConfig.parse(options), target)
    return out


def refusal(batch: LogprobBatch, by: ProvenanceGuard | None = None) -> str:
    with pytest.raises(LogprobProvenanceError) as caught:
        (by or guard()).spec_check_logprobs(batch)
    return str(caught.value)


def changed(values: Tensor, at: tuple[int, int], to: float) -> Tensor:
    out = values.clone()
    out[at] = to
    return out


def test_law_3_an_honest_batch_passes_and_is_measured(honest):
    checked = guard()
    checked.spec_check_logprobs(honest)
    metrics = checked.spec_metrics()
    assert 0 < metrics["spec/logprob_diff_mean"] < metrics["spec/logprob_diff_max"] < 1e-4
    assert metrics["spec/logprob_tolerance"] == 1e-3


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
    assert "not the target's" in refusal(replace(honest, recomputed=fresh, rollout=stale, rollout_versions=None))


def test_law_3_one_corrupted_sequence_among_many_is_refused_and_named(honest, tokens):
    rollout = honest.rollout.clone()
    rollout[11] -= 0.008  # the batch's mean stays at half of what is allowed
    message = refusal(replace(honest, rollout=rollout))
    assert "mean difference of a sequence" in message and "sequence 11 position 0" in message


def test_law_3_one_corrupted_token_is_refused_and_named(honest):
    rollout = honest.rollout.clone()
    rollout[12, 2] -= 0.07  # neither the batch's nor the sequence's mean shows it
    message = refusal(replace(honest, rollout=rollout))
    assert "difference of a token" in message and "sequence 12 position 2" in message


@pytest.mark.parametrize("wrong", [VERSION - 1, VERSION + 1, 0])
def test_law_3_a_sequence_of_another_policy_version_is_refused_with_both_versions(honest, wrong):
    versions = torch.full((B,), VERSION)
    versions[6] = wrong
    message = refusal(replace(honest, rollout_versions=versions))
    assert f"sequence 6 by version {wrong}" in message and f"policy version {VERSION}" in message


def test_an_unknown_policy_version_is_left_to_the_comparison(honest):
    guard().spec_check_logprobs(replace(honest, rollout_versions=torch.full((B,), -1)))


def test_noise_as_bfloat16_makes_it_is_accepted_in_bfloat16_only(honest):
    generator = torch.Generator().manual_seed(3)
    noise = 0.012 * torch.randn(B, T, generator=generator)
    noise[2, 2] = 0.4  # single tokens scatter far more than the mean
    batch = replace(honest, rollout=(honest.recomputed + noise).clamp_max(0))
    guard("bfloat16").spec_check_logprobs(batch)
    assert "not the target's" in refusal(batch)


def test_the_coarser_of_the_two_dtypes_decides():
    assert (
        Tolerance.of("float32", "bfloat16")
        == Tolerance.of("bfloat16", "float32")
        == Tolerance.of("bfloat16", "float16")
    )


@pytest.mark.parametrize("speculating", [True, False])
def test_only_batches_without_speculation_raise_the_tolerance(honest, speculating):
    checked = guard()
    noisy = replace(honest, rollout=honest.recomputed - 9e-4, speculating=speculating)
    checked.spec_check_logprobs(noisy)
    worse = replace(honest, rollout=honest.recomputed - 2e-3, speculating=True)
    if speculating:
        assert "allowed 0.001" in refusal(worse, checked)
    else:
        checked.spec_check_logprobs(worse)
        assert checked.spec_metrics()["spec/logprob_tolerance"] == pytest.approx(2.7e-3, rel=1e-3)


def test_the_users_own_tolerance_replaces_dtype_and_baseline(honest):
    batch = replace(honest, rollout=honest.recomputed - 5e-3)
    guard(logprob_tolerance=0.01).spec_check_logprobs(batch)
    assert "allowed 0.0001" in refusal(replace(honest, rollout=honest.recomputed - 2e-4), guard(logprob_tolerance=1e-4))


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
    assert agreement(empty.recomputed, empty.rollout, empty.mask).tokens == 0


def test_only_the_first_violations_are_shown(honest):
    message = refusal(replace(honest, rollout=torch.full((B, T), float("nan"))))
    assert message.count("position") == 3 and f"{int(honest.mask.sum())} of {int(honest.mask.sum())}" in message
