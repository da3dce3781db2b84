"""Law 2's mathematics: valid at the declared error level, and able to see the faults that real engines have had."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from simulators.selftest import (
    PROMPTS,
    M,
    N,
    V,
    accepts_bad_draft,
    copies_draft,
    favours,
    mixed,
    sample,
    tempered,
)
from simulators.selftest import model as language_model

from spec_plugin.engine.selftest import verdicts
from spec_plugin.engine.selftest.self_test_plan import Sampled
from spec_plugin.engine.selftest.stats import Evidence, evidence, exact_p, two_sample
from spec_plugin.engine.selftest.verdicts import (
    counts_check,
    evidence_check,
    finite_check,
    greedy_check,
    greedy_limit,
    greedy_noise,
    logprob_check,
    not_stated,
    path_check,
)


def _arms(rng, model, faulty, n=N):
    a = [sample(rng, faulty, n).tolist() for _ in range(PROMPTS)]
    b = [sample(rng, model, n).tolist() for _ in range(PROMPTS)]
    return a, b


def _shown(model, x, alpha, top=20):
    """Do the log-probs that ``model`` states for the tokens of sequences x [n, M] show at this level that it is another's."""
    p = model[np.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=V)]  # [n, M, V]
    order = np.argsort(-p, 2)[..., :top]
    stated = np.log(np.take_along_axis(p, x[..., None], 2)[..., 0])
    tops = np.log(np.take_along_axis(p, order, 2))
    arm = [Sampled(0, tuple(row), *arrays) for row, *arrays in zip(x.tolist(), stated, tops, order, strict=True)]
    return evidence(arm, V).log_ratio >= math.log(1 / alpha)


def test_fisher_is_exact_by_brute_force_over_all_assignments_of_labels():
    n_a, n_b, marked = 5, 6, 4
    pool = [1] * marked + [0] * (n_a + n_b - marked)
    draws = [sum(pool[i] for i in pick) for pick in itertools.combinations(range(n_a + n_b), n_a)]
    chance = {x: draws.count(x) / len(draws) for x in set(draws)}
    for x, p in chance.items():
        want = sum(q for q in chance.values() if q <= p * (1 + 1e-9))
        assert exact_p([(x, n_a, marked - x, n_b)]) == pytest.approx(want, rel=1e-10)


def test_fisher_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for x_a, n_a, x_b, n_b in [(3, 40, 17, 45), (0, 200, 9, 180), (120, 300, 60, 300), (1, 2, 1, 3)]:
        want = stats.fisher_exact([[x_a, n_a - x_a], [x_b, n_b - x_b]])[1]
        assert exact_p([(x_a, n_a, x_b, n_b)]) == pytest.approx(want, rel=1e-6)


def test_a_sum_over_strata_is_exact_by_brute_force():
    strata = [(2, 3, 1, 4), (3, 4, 1, 3)]
    draws = []
    for x_a, n_a, x_b, n_b in strata:
        pool = [1] * (x_a + x_b) + [0] * (n_a + n_b - x_a - x_b)
        draws.append([sum(pool[i] for i in pick) for pick in itertools.combinations(range(n_a + n_b), n_a)])
    sums = [a + b for a in draws[0] for b in draws[1]]
    chance = {x: sums.count(x) / len(sums) for x in set(sums)}
    assert exact_p(strata) == pytest.approx(sum(p for p in chance.values() if p <= chance[5] * (1 + 1e-9)))


def test_a_correct_engine_is_rejected_no_more_often_than_declared():
    """1000 repetitions at 5 %: at most 5 % and three binomial standard errors (0.05 + 3 * 0.0069 = 0.0707)."""
    rng, alpha, repetitions = np.random.default_rng(0), 0.05, 1000
    bound = alpha + 3 * math.sqrt(alpha * (1 - alpha) / repetitions)
    counts = logs = 0
    for i in range(10):
        model = language_model(rng, sharpness=(1.0, 2.5, 5.0)[i % 3])
        arms = sample(rng, model, 100 * 4 * 24, 4).reshape(100, 2, 2, 24, 4).tolist()
        counts += sum(two_sample(a, b, alpha).p_value <= alpha for a, b in arms)
        samples = sample(rng, model, 100 * 24).reshape(100, 24, M)
        logs += sum(_shown(model, x, alpha) for x in samples)
    print(f"\nrejected: counts {counts / repetitions:.4f}, log-probs {logs / repetitions:.4f}")
    assert counts / repetitions <= bound and logs / repetitions <= bound


def test_unequal_arms_are_valid_too():
    rng, alpha, repetitions = np.random.default_rng(1), 0.05, 500
    model = language_model(rng)
    few, many = (sample(rng, model, repetitions * n).reshape(repetitions, 1, n, M).tolist() for n in (10, 60))
    hits = sum(two_sample(a, b, alpha).p_value <= alpha for a, b in zip(few, many, strict=True))
    assert hits / repetitions <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / repetitions)


FAULTS = {
    "temperature 1.0 became 0.8": lambda m: tempered(m, 1.25),
    "10 % of the mass is uniform": lambda m: mixed(m, 0.1),
    "a good draft is accepted unasked in 10 % of the steps": lambda m: copies_draft(m, 0.1),
    "a bad draft is accepted unasked in 10 % of the steps": lambda m: accepts_bad_draft(m, 0.1),
    "a mediocre draft is accepted unasked in 5 % of the steps": lambda m: copies_draft(m, 0.05, place=1),
    "a poor draft is accepted unasked in 5 % of the steps": lambda m: copies_draft(m, 0.05, place=2),
    "one token has 1.75 times its odds": lambda m: favours(m, 1.75),
    "one token has half its odds": lambda m: favours(m, 0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_stated_log_probs_show_a_fault_at_one_in_a_million(fault):
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(10):
        model = language_model(rng)
        found += _shown(model, sample(rng, FAULTS[fault](model), N * PROMPTS), 5e-7)
    assert found >= 9, f"{fault}: {found}/10"


@pytest.mark.parametrize(
    "fault",
    {
        "temperature 1.0 became 0.5": lambda m: tempered(m, 2.0),
        "half of the mass is uniform": lambda m: mixed(m, 0.5),
        "a good draft is accepted unasked in 30 % of the steps": lambda m: copies_draft(m, 0.3),
        "a bad draft is accepted unasked in 15 % of the steps": lambda m: accepts_bad_draft(m, 0.15),
    }.items(),
    ids=lambda f: f[0],
)
def test_counts_alone_show_a_gross_fault_at_one_in_a_million(fault):
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(10):
        model = language_model(rng)
        found += two_sample(*_arms(rng, model, fault[1](model)), 5e-7).p_value <= 5e-7
    assert found >= 9, f"{fault[0]}: {found}/10"


def test_counts_show_what_befalls_two_positions_whatever_came_before():
    """A stale proposal in place of a sample, where k was switched: rare over all tokens, and of no one token."""
    rng, found = np.random.default_rng(5), 0
    for _ in range(10):
        a, b = _arms(rng, model := language_model(rng, 5.0), model, n=128)
        for i, arm in enumerate(a):
            for sequence in arm:
                for t in (3, 4):
                    if rng.random() < 0.6:
                        sequence[t] = (sequence[t] + 7 * i + 1) % V
        found += two_sample(a, b, 5e-7).p_value <= 5e-7
    assert found >= 9, f"{found}/10"


def test_counts_show_a_token_that_only_one_arm_ever_samples():
    a = [[[1, 2, 3]] * 40 + [[1, 5, 3]] * 40]
    b = [[[1, 2, 3]] * 80]
    result = two_sample(a, b, 1e-6)
    assert result.p_value <= 1e-6 and "prompt 0 t=1" in result.worst


def test_too_few_samples_say_so_instead_of_passing_as_evidence():
    result = two_sample([[[1, 2]] * 3], [[[1, 2]] * 3], 1e-6)
    assert (result.p_value, result.tests) == (1.0, 0) and "one token" in result.worst


def _sequence(tokens, top, top_ids):
    """A sequence whose log-probs are looked up in its own top."""
    logprobs = [row[ids.index(t)] if t in ids else -9.0 for t, ids, row in zip(tokens, top_ids, top, strict=True)]
    return Sampled(0, tuple(tokens), np.array(logprobs), np.array(top), np.array(top_ids))


def test_greedy_outputs_may_differ_by_a_tie_and_by_nothing_else():
    def at(gap, token):
        top, ids = [[-0.1, -5.0], [-0.7, -0.7 - gap]], [[1, 2], [3, 4]]
        return greedy_check([_sequence([1, token], top, ids)], [_sequence([1, 3], top, ids)], limit=0.25)

    assert at(0.2, 3).passed and "1/1 identical" in at(0.2, 3).detail
    assert at(0.2, 4).passed and "1 ties" in at(0.2, 4).detail
    assert not at(0.3, 4).passed and "position 1: 4 instead of 3" in at(0.3, 4).detail
    assert not at(0.3, 99).passed  # it is at least as far away as the last that is known


def test_the_noise_of_plain_requests_is_read_as_long_as_they_go_together():
    top, ids = [[-0.1, -3.0]] * 3, [[5, 6]] * 3
    one = _sequence([5, 5, 5], top, ids)
    two = _sequence([5, 6, 5], [[-0.2, -3.0], [-1.0, -1.5], [-9.0, -9.5]], [[5, 6], [6, 5], [5, 6]])
    assert greedy_noise([one], [two]) == pytest.approx([2.9 - 2.8, 2.9 + 0.5])
    assert greedy_noise([one], [one]) == [0.0] * 3
    assert greedy_limit([], 0.25) == 0.25
    assert greedy_limit([0.0] * 50 + [0.1], 0.25) == pytest.approx(0.25 + 0.3)
    assert greedy_limit([0.1, -0.1] * 50, 0.25) == pytest.approx(0.25 + 0.7)


def greedy_alarms(rng, sigma, rounded, engines, tolerance=0.25):
    """Share of correct engines whose greedy check fails before it is repeated: noise on every logit of every computation.

    Logits of the two best tokens lie around 24, where bfloat16 counts in eighths; each engine has 8 prompts of 24 tokens.
    """

    def computed(logits):
        noisy = logits + rng.normal(size=logits.shape) * sigma
        return np.round(noisy * 8) / 8 if rounded else noisy

    places = 24 + rng.normal(size=(engines, 8 * 24, 2)) * 2.5
    plain, spec = computed(places), computed(places)
    gaps = plain[..., 0] - plain[..., 1]
    flips = (gaps > 0) != (spec[..., 0] > spec[..., 1])
    gaps = np.where(flips, np.abs(gaps), 0.0).max(1)
    alarms = 0
    for engine in np.flatnonzero(gaps > tolerance):
        pairs = [np.diff(computed(places[engine]), axis=1)[:, 0] for _ in range(3)]
        noise = [a - b for a, b in itertools.combinations(pairs, 2)]
        alarms += gaps[engine] > greedy_limit(np.concatenate(noise).tolist(), tolerance)
    return alarms, float((gaps > tolerance).mean())


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1, 0.2])
def test_noise_as_bfloat16_makes_it_does_not_fail_the_greedy_check(sigma, rounded):
    alarms, before = greedy_alarms(np.random.default_rng(7), sigma, rounded, 2000)
    assert alarms == 0
    assert before > 0.2 or sigma < 0.1  # a fixed tolerance would have


def test_the_first_log_prob_that_is_no_number_is_named():
    good, bad = ([[-0.1, -3.0]] * 3, [[5, 6]] * 3), [[-0.1, -3.0], [math.nan, -3.0], [-math.inf, -3.0]]
    plain = _sequence([5, 5, 5], *good)
    check = finite_check([plain, _sequence([5, 5, 5], bad, good[1])], [plain])
    assert not check.passed
    assert check.detail == "2 of 9 log-probs not finite; first: speculating sequence 1 (prompt 0) position 1: nan"


def test_recomputed_log_probs_may_be_as_noisy_as_those_of_plain_requests():
    assert logprob_check("x", [0.002] * 9, [0.002] * 9, tolerance=1e-3).passed
    assert not logprob_check("x", [0.002] * 9, [0.0] * 9, tolerance=1e-3).passed
    assert not logprob_check("x", [0.5] * 9, [0.5] * 9, tolerance=1e-3).passed  # wrong in both arms is still wrong
    assert not logprob_check("x", [math.nan, 0.0], [0.0, 0.0], tolerance=1e-3).passed
    assert not logprob_check("x", [], [0.0], tolerance=1e-3).passed
    assert logprob_check("x", [math.inf] + [0.0] * 9, [0.0] * 9, tolerance=1e-3).passed
    assert not logprob_check("x", [math.inf] * 5 + [0.0] * 5, [0.0] * 9, tolerance=1e-3).passed
    assert not logprob_check("x", [math.inf] * 9, [0.0] * 9, tolerance=1e-3, strays=1).passed


def test_a_stray_token_may_differ_by_anything_but_no_number():
    def passes(*others, rounding=0.02):
        return logprob_check("x", [*others, *[rounding] * 64], [0.02] * 64, tolerance=0.25, strays=1).passed

    assert passes() and passes(1.2) and passes(30.0)
    assert not passes(1.2, 1.2)
    assert not passes(math.nan), "a NaN is never rounding"
    assert not passes(1.2, rounding=0.09), "the mean of the others tells"
    assert not logprob_check("x", [1.2], [0.02] * 64, tolerance=0.25, strays=1).passed, "a stray is no comparison"


def test_log_probs_that_plain_requests_do_not_follow_either_say_nothing_of_speculation():
    """An option that we do not know of changes the sampler in both arms: not applicable; in one arm: a fault."""
    flat, sure = [[math.log(0.5), math.log(0.5)]] * 101, [[1, 2]] * 101
    follows, deviates = _sequence([1, 2] * 50 + [1], flat, sure), _sequence([1] * 101, flat, sure)
    assert evidence_check([follows] * 9, [follows] * 9, V, 5e-7).passed
    assert not evidence_check([deviates] * 9, [follows] * 9, V, 5e-7).passed
    check = evidence_check([deviates] * 9, [deviates] * 9, V, 5e-7)
    assert check.passed and check.unproven and "unproven: plain requests, too, deviate" in check.detail
    assert "looks like" in check.detail
    assert not evidence_check([follows] * 9, [follows] * 9, V, 5e-7).unproven


def _hotter(rng: np.random.Generator, sequences: int, times: float) -> list[Sampled]:
    """An engine whose sampler runs at so many times the temperature that its log-probs are stated for."""
    out = []
    for _ in range(sequences):
        logits = rng.normal(size=(9, 20))
        stated = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        real = np.exp(logits / times) / np.exp(logits / times).sum(-1, keepdims=True)
        tokens = [int(rng.choice(20, p=p)) for p in real]
        order = np.argsort(-stated, axis=-1)
        top = np.take_along_axis(stated, order, -1)
        out.append(Sampled(0, tuple(tokens), stated[np.arange(9), tokens], top, order))
    return out


@pytest.mark.parametrize(("times", "unproven"), [(1.0, False), (1.1, True), (0.9, True)])
def test_law_2_an_engine_whose_plain_requests_contradict_their_own_log_probs_is_not_proven(times, unproven):
    """A temperature 10 % off in both arms: equal counts, right log-probs, and not the samples that are stated."""
    rng = np.random.default_rng(1)
    spec, plain = (_hotter(rng, 1500, times) for _ in range(2))
    check = evidence_check(spec, plain, 20, 5e-7)
    assert (check.passed, check.unproven) == (True, unproven)
    assert counts_check(spec, plain, 5e-7).passed, "nothing else sees it"


@pytest.mark.parametrize(
    ("plain", "passed", "unproven"), [(1e-9, True, True), (0.3, False, False), (0.9, False, False)]
)
def test_law_2_only_a_plain_arm_that_is_refused_itself_excuses_the_other(monkeypatch, plain, passed, unproven):
    ratios = iter(
        (math.log(1e9), math.log(1 / plain))
    )  # speculating, then plain: of a right one anything up to 1 / alpha
    monkeypatch.setattr(verdicts, "evidence", lambda *_: Evidence(next(ratios), 100, "something"))
    check = evidence_check([], [], 8, alpha=1e-6)
    assert (check.passed, check.unproven) == (passed, unproven), check.detail


@pytest.mark.parametrize(
    ("mode", "sampling", "stated"),
    [
        ("raw_logprobs", {"temperature": 0.7}, False),
        ("raw_logprobs", {"temperature": 1.0, "repetition_penalty": 1.1}, False),
        ("raw_logits", {}, False),
        ("raw_logprobs", {"temperature": 1.0, "top_p": 1.0, "top_k": -1}, True),
        ("processed_logprobs", {"temperature": 0.7, "top_k": 8}, True),
    ],
)
def test_law_2_where_other_log_probs_are_stated_than_sampled_by_that_is_said_to_be_unproven(mode, sampling, stated):
    check = not_stated(mode, sampling)
    assert (check is None) == stated
    if check is not None:
        assert check.passed and check.unproven and "logprobs_mode=processed_logprobs would prove it" in check.detail


@pytest.mark.parametrize("token", [30, 31, 39])
def test_law_2_tokens_beyond_the_tokenizers_are_samples_like_others(token):
    """Qwen names 151,669 tokens and has 151,936 rows; an untrained row is as likely as any."""
    flat, ids = [[math.log(0.5), math.log(0.5)]] * 101, [[1, token]] * 101
    arm = [_sequence([1, token] * 50 + [1], flat, ids)] * 9
    assert evidence_check(arm, arm, 40, 5e-7).passed


def test_law_2_a_token_as_good_as_impossible_does_not_blind_the_evidence():
    """At a low temperature the third token has e^-900, which is 0 in float64, and a ratio to it is no number."""
    top, ids = [[math.log(0.99), math.log(0.01), -900.0]] * 101, [[1, 2, 3]] * 101
    right, wrong = ([_sequence([1] * 101, top, ids)] * 9, [_sequence([1, 2] * 50 + [1], top, ids)] * 9)
    check = evidence_check(right, right, V, 5e-7)
    assert check.passed and not check.unproven and "nan" not in check.detail, check.detail
    assert not evidence_check(wrong, right, V, 5e-7).passed


def test_a_handful_of_samples_is_no_proof():
    few = [_sequence([1, 1], [[-0.1, -3.0]] * 2, [[1, 2]] * 2)] * 8
    check = counts_check(few, few, 5e-7)
    assert not check.passed and "prove nothing" in check.detail


def test_no_verified_draft_is_no_proof():
    before = {"drafts": 5, "draft_tokens": 15, "accepted_tokens": 2}
    assert not path_check(before, before).passed
    assert "20 accepted tokens" in path_check(before, {"drafts": 15, "draft_tokens": 45, "accepted_tokens": 22}).detail
