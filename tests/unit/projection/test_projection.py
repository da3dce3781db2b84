"""A projection: shapes, the roofline's properties and limits, rollouts against hand-counted ones, stages."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_plugin_projection.constants import KNOWN, Constants
from spec_plugin_projection.hardware import CARDS, find_card
from spec_plugin_projection.lengths import from_file, from_responses, lognormal, percentiles
from spec_plugin_projection.measured import Measured, StepTimes, Work, calibrated, draft_pass_from
from spec_plugin_projection.projecting import (
    AUTO,
    Estimate,
    Overrides,
    Question,
    chances_through,
    max_running,
    project,
)
from spec_plugin_projection.rollout import (
    SimulatedPhase,
    Workload,
    effective_lengths,
    emission_probabilities,
    simulate,
    split,
)
from spec_plugin_projection.roofline import Deployment, Roofline
from spec_plugin_projection.shapes import MODELS, find_model, shape_of
from spec_plugin_projection.stages import Stages, exposed_seconds, step_seconds, trainer_seconds

from draft_training import DraftConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import StepTiming
from spec_plugin.step_cost.chances import constant_acceptance, tokens_per_step

TYPICAL = Constants.typical()
QWEN_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


class Flat:
    """A step of one second, and half a second more for each drafted token of the batch."""

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        return 1.0 + 0.5 * k


def roofline(model: str = "Qwen3-8B", card: str = "H100", **split: float) -> Roofline:
    return Roofline(Deployment(find_model(model).with_whole_head(), find_card(card), **split), TYPICAL)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.19),
        ("Qwen3-32B", 32.8),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235.1),
        ("Qwen2.5-7B", 7.62),
        ("Llama-3.1-8B", 8.03),
        ("Llama-3.1-70B", 70.6),
        ("Llama-3.1-405B", 405.9),
        ("Mixtral-8x7B-v0.1", 46.7),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
    ],
)
def test_a_known_models_parameters_are_those_that_its_makers_state(name: str, billions: float) -> None:
    assert find_model(name).parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_a_name_is_found_with_its_organisation_and_in_any_case() -> None:
    assert find_model("Qwen/qwen3-8b").parameters == find_model("Qwen/Qwen3-8B-Base").parameters


def test_a_config_file_gives_the_shape_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_8B))
    read, known = find_model(str(tmp_path)), MODELS["qwen3-8b"]
    assert (read.parameters, read.active_parameters) == (known.parameters, known.active_parameters)
    assert read.kv_bytes(2) == known.kv_bytes(2) == 147456


def test_the_draft_is_as_large_as_the_one_that_is_trained() -> None:
    whole = DraftConfig.from_target(QWEN_8B)
    pruned = DraftConfig.from_target(QWEN_8B, draft_vocab_size=whole.fitting_vocabulary)
    head, norms = 4096 * 151936, 4 * 4096  # a whole head is the target's, and read all the same
    assert MODELS["qwen3-8b"].with_whole_head().draft_parameters == whole.parameters + head - norms
    assert MODELS["qwen3-8b"].draft_parameters == pruned.parameters - norms


def test_of_experts_one_token_touches_its_own_and_many_touch_all() -> None:
    moe = find_model("Qwen3-235B-A22B")
    assert moe.experts_touched(0) == 0
    assert moe.experts_touched(1) == pytest.approx(8)
    assert moe.experts_touched(10_000) == pytest.approx(128)
    assert find_model("Qwen3-8B").experts_touched(7) == 0


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("nonsense", "no JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "lacks hidden_size"),
        (json.dumps(QWEN_8B | {"num_attention_heads": 0}), "lacks num_attention_heads"),
        ("MLA", "kv_lora_rank"),
        (json.dumps({**QWEN_8B, "head_dim": None, "num_attention_heads": 24}), "no multiple of num_attention_heads=24"),
        (json.dumps(QWEN_8B | {"num_key_value_heads": 64}), "no multiple of num_key_value_heads=64"),
        (json.dumps(QWEN_8B | {"architectures": ["BertModel"]}), "generate no text"),
        (json.dumps(QWEN_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}), "only fp8 is"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_in_a_sentence(tmp_path: Path, content: str, word: str) -> None:
    text = json.dumps(QWEN_8B | {"kv_lora_rank": 512}) if content == "MLA" else content
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecConfigError, match=word) as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_unknown_model_and_an_unknown_card_name_what_is_known() -> None:
    with pytest.raises(SpecConfigError, match=r"neither known nor a folder.*Qwen3-235B-A22B"):
        find_model("Gwen9-8B")
    with pytest.raises(SpecConfigError, match=r"'H99' is not known; known are A100"):
        find_card("H99")


@pytest.mark.parametrize("field", ["n_shared_experts", "shared_expert_intermediate_size", "moe_num_shared_experts"])
def test_experts_that_every_token_takes_are_refused_since_they_are_not_counted(field: str) -> None:
    with pytest.raises(SpecConfigError, match=field):
        shape_of(QWEN_8B | {"num_experts": 4, "num_experts_per_tok": 2, field: 2}, "m")


def test_sizes_are_read_where_the_model_for_texts_stands_and_tied_embeddings_beside_it() -> None:
    assert shape_of({"llm_config": QWEN_8B}, "m").hidden == QWEN_8B["hidden_size"]
    assert shape_of({"text_config": QWEN_8B, "tie_word_embeddings": True}, "m").tied


def test_experts_of_other_families_are_read_under_their_names() -> None:
    ernie = shape_of(QWEN_8B | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 50}, "m")
    assert (ernie.experts, ernie.experts_per_token, ernie.intermediate) == (64, 6, 50)
    config = QWEN_8B | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 100}
    shape = shape_of(config, "m")
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (4, 2, 100)


# ------------------------------------------------------------------------------------------------------ roofline


def published(batch: int, k: int, context: int) -> float:
    """vLLM on an H100 with Llama-3.1-8B, as SpecDecode-Bench/simulator's ``predictor.py`` states it."""
    forward = 5.88590713e-3 + 2.10103129e-05 * batch * (k + 1) + 3.92645679e-08 * batch * context
    draft = (2.13526175e-03 + 2.37768493e-09 * batch * context) * k / 3
    return forward + 1.20683946e-03 + draft


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("context", [500, 4000])
def test_steps_are_within_a_sixth_of_those_that_vllm_0_10_took_on_an_h100(batch: int, k: int, context: int) -> None:
    seconds = roofline("Llama-3.1-8B").seconds(batch, k, context=context)
    assert seconds == pytest.approx(published(batch, k, context), rel=1 / 6)


steps = st.tuples(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(CARDS)),
    st.integers(1, 512),
    st.integers(0, 15),
    st.integers(0, 40_000),
    st.sampled_from([1, 2, 4, 8]),
)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_a_step_never_gets_faster_with_more_requests_drafts_or_context(
    step: tuple[str, str, int, int, int, int],
) -> None:
    model, card, batch, k, context, tp = step
    cost = roofline(model, card, tp=tp)
    here = cost.seconds(batch, k, context=context)
    assert math.isfinite(here) and here > 0
    assert cost.seconds(batch + 1, k, context=context) >= here
    assert cost.seconds(batch, k + 1, context=context) > here
    assert cost.seconds(batch, k, context=context + 1) >= here


@given(steps)
@settings(max_examples=100, deadline=None)
def test_a_step_is_linear_in_the_context(step: tuple[str, str, int, int, int, int]) -> None:
    model, card, batch, k, context, tp = step
    cost = roofline(model, card, tp=tp)
    none, some, twice = (cost.seconds(batch, k, context=c) for c in (0, context, 2 * context))
    assert twice - some == pytest.approx(some - none, rel=1e-6, abs=1e-12)


def test_without_drafts_a_paused_draft_costs_nothing_and_another_one_pass() -> None:
    cost = roofline()
    pass_s = cost.seconds(4, 0, paused=False, context=100) - cost.seconds(4, 0, context=100)
    assert pass_s > TYPICAL.draft_pass_s
    assert cost.seconds(4, 0, context=100) < cost.seconds(4, 1, context=100)


def test_at_batch_one_reading_decides_and_half_the_bytes_take_half_of_it() -> None:
    free = TYPICAL.but(step_s=1e-12, products_reached=1e6)
    deployment = Deployment(find_model("Qwen3-8B"), find_card("H100"))
    bf16 = Roofline(deployment, free).seconds(1, 0, context=0)
    assert bf16 == pytest.approx(2 * 7.568e9 / (3.35e12 * free.weights_reached), rel=1e-3)
    fp8 = Roofline(Deployment(deployment.model, deployment.card, weight_bytes=1), free).seconds(1, 0, context=0)
    assert fp8 == pytest.approx(bf16 / 2, rel=1e-3)


def test_two_cards_read_half_each_and_exchange_twice_a_layer() -> None:
    free = TYPICAL.but(step_s=1e-12, products_reached=1e6, link_reached=1e9)
    model, card = find_model("Qwen3-8B"), find_card("H100")
    one, two = (Roofline(Deployment(model, card, tp=tp), free).seconds(1, 0, context=0) for tp in (1, 2))
    assert two == pytest.approx(one / 2 + 2 * 36 * free.hop_s, rel=1e-3)


def test_split_experts_are_touched_by_the_tokens_of_all_engines_that_share_them() -> None:
    model, card = find_model("Qwen3-235B-A22B"), find_card("GB200")
    alone = Roofline(Deployment(model, card, tp=8), TYPICAL)._reading(1)
    shared = Roofline(Deployment(model, card, tp=8, ep=64), TYPICAL)._reading(1)
    assert shared < alone  # eight tokens touch less than eight times what one does


def test_a_model_that_does_not_fit_says_how_large_it_is() -> None:
    with pytest.raises(SpecConfigError, match=r"405B.*GB of weights on each of 1 H100.*split it further"):
        Deployment(find_model("Llama-3.1-405B"), find_card("H100")).cache_tokens()


def test_the_cache_of_an_engine_limits_how_many_run_at_once() -> None:
    question = asked(lengths=lognormal(20_000, 40_000), seats=1024)
    assert max_running(question) < 1024
    assert max_running(question) * (20_000 + question.prompt) == pytest.approx(
        question.deployment.cache_tokens(), rel=0.2
    )


def test_every_constant_has_a_range_about_its_value_and_a_source() -> None:
    assert [field.name for field in fields(Constants)] == list(KNOWN)
    for constant in KNOWN.values():
        assert constant.low <= constant.typical <= constant.high and constant.source and constant.meaning
    assert all(" data sheet: " in card.source for card in CARDS.values())


# ------------------------------------------------------------------------------------------------------ lengths


def test_a_lognormal_has_the_mean_that_was_asked_for_after_the_cut() -> None:
    found = lognormal(3000, 8000)
    assert found.mean == pytest.approx(3000, rel=0.01)
    assert found.longest == 8000


def test_a_lognormals_sigma_is_that_of_the_logarithms() -> None:
    found = lognormal(1000, 1e9, sigma=0.5)
    drawn = found.drawn(4096, np.random.default_rng(0))
    assert np.log(np.percentile(drawn, 84.13) / np.percentile(drawn, 50)) == pytest.approx(0.5, rel=0.02)


def test_percentiles_are_met_and_the_longest_of_many_responses_hardly_varies() -> None:
    found = percentiles({50: 1000, 90: 4000, 100: 8000})
    drawn = [found.drawn(4096, np.random.default_rng(seed)) for seed in range(3)]
    for lengths in drawn:
        assert np.percentile(lengths, 50) == pytest.approx(1000, rel=0.02)
        assert np.percentile(lengths, 90) == pytest.approx(4000, rel=0.02)
        assert lengths.max() == pytest.approx(8000, rel=0.01)


def test_lengths_of_a_file_are_those_of_the_file(tmp_path: Path) -> None:
    for text in ("[5, 10, 15]", "10\n5\n15\n"):
        (tmp_path / "lengths").write_text(text)
        assert from_file(tmp_path / "lengths").quantiles == (5, 10, 15)


@pytest.mark.parametrize("values", [[], [0], [-3, 4], [math.nan], ["a"]])
def test_what_is_no_length_is_refused(values: list[float]) -> None:
    with pytest.raises(SpecConfigError, match="a list of numbers of tokens"):
        from_responses(values, "lengths")


def test_impossible_distributions_are_refused() -> None:
    with pytest.raises(SpecConfigError, match="between 1 and the longest"):
        lognormal(9000, 8000)
    with pytest.raises(SpecConfigError, match="between 1 and the longest"):
        lognormal(9000, math.inf)
    with pytest.raises(SpecConfigError, match="do not fall"):
        percentiles({50: 4000, 90: 1000})


# ------------------------------------------------------------------------------------------------------ rollouts


def rollout(lengths: list[int], engines: int = 1, seats: int = 64, prompt: float = 0.0) -> Workload:
    return Workload(np.array(lengths, dtype=float), prompt, 1, engines, seats)


def test_one_response_takes_a_step_for_each_token_after_the_first() -> None:
    phase = simulate(rollout([10]), Flat(), (), 0, np.random.default_rng(0))
    assert phase.seconds == pytest.approx(9.0)
    assert phase.load == {1: 9.0}


def test_a_batch_lasts_as_long_as_its_longest_and_drains_on_the_way() -> None:
    phase = simulate(rollout([11, 6, 6]), Flat(), (), 0, np.random.default_rng(0))
    assert phase.seconds == pytest.approx(10.0)
    assert phase.load == {3: 15.0, 1: 5.0}


def test_whoever_finds_no_seat_waits() -> None:
    phase = simulate(rollout([11, 11], seats=1), Flat(), (), 0, np.random.default_rng(0))
    assert phase.seconds == pytest.approx(20.0)


def test_the_slowest_engine_decides() -> None:
    phase = simulate(rollout([11, 31], engines=2), Flat(), (), 0, np.random.default_rng(0))
    assert phase.seconds == pytest.approx(30.0)


def test_engines_without_a_response_are_idle() -> None:
    phase = simulate(rollout([11, 31], engines=10**9), Flat(), (), 0, np.random.default_rng(0))
    assert phase.seconds == pytest.approx(30.0)


def test_a_perfect_draft_needs_a_step_for_k_plus_one_tokens() -> None:
    phase = simulate(rollout([9]), Flat(), (1.0,), 3, np.random.default_rng(0))
    assert phase.seconds == pytest.approx(2 * 2.5)  # eight tokens in two steps


def test_a_table_drafts_only_at_the_batch_sizes_that_it_names() -> None:
    phase = simulate(rollout([11, 6]), Flat(), (1.0,), (0, 1, 0), np.random.default_rng(0))
    # five steps of two without drafts, then two tokens a step; the last may overshoot by half a token on average
    assert phase.seconds == pytest.approx(5.0 + 1.5 * 2.5, abs=1.6)


@pytest.mark.parametrize("tokens", [20, 100, 150, 400])
@pytest.mark.parametrize(("chance", "k"), [(0.5, 3), (0.9, 8)])
def test_steps_that_responses_need_are_those_of_a_simulation_token_by_token(tokens: int, chance: float, k: int) -> None:
    rng, count = np.random.default_rng(0), 6000
    draws = rng.choice(np.arange(1, k + 2), size=(count, tokens), p=emission_probabilities((chance,), k))
    brute = 1 + (draws.cumsum(axis=1) < tokens).sum(axis=1)
    mean = tokens_per_step((chance,), k)
    ours = effective_lengths(np.full(count, float(tokens)), (chance,), k, np.random.default_rng(1)) / mean
    assert np.mean(ours) == pytest.approx(np.mean(brute), rel=0.006)
    assert np.std(ours) == pytest.approx(np.std(brute), rel=0.1)


def test_what_a_step_emits_are_chances_and_have_the_mean_of_the_cost_model() -> None:
    emitted = emission_probabilities((0.9, 0.7, 0.5), 4)
    assert emitted.sum() == pytest.approx(1.0) and (emitted >= 0).all()
    assert emitted @ np.arange(1, 6) == pytest.approx(tokens_per_step((0.9, 0.7, 0.5), 4))


# ------------------------------------------------------------------------------------------------------ projection


def asked(**changed: object) -> Question:
    given: dict[str, object] = {
        "deployment": Deployment(find_model("Qwen3-8B"), find_card("H100")),
        "gpus": 8,
        "batch": 256,
        "lengths": lognormal(2000, 8000),
        "acceptance": {3: 2.8},
        "ks": (1, 3),
    }
    return Question(**(given | changed))  # type: ignore[arg-type]


def test_plain_is_the_measure_of_everything() -> None:
    row = project(asked(), draws=2).rows[0]
    assert (row.k, row.tokens) == (0, 1.0)
    assert row.rollout_speedup == row.step_speedup
    assert (row.rollout_speedup.low, row.rollout_speedup.typical, row.rollout_speedup.high) == (1.0, 1.0, 1.0)


def test_no_rollout_is_faster_than_the_tokens_of_a_step_allow_and_no_step_faster_than_its_rollout() -> None:
    for row in project(asked(ks=(1, 2, 3, 5, 8)), draws=8).rows:
        if row.k > 0:
            assert row.rollout_speedup.high <= row.tokens * 1.05  # longest responses may be lucky ones
            assert row.step_speedup.typical <= max(1.0, row.rollout_speedup.typical)


def test_where_drafting_and_verifying_cost_nothing_the_speedup_is_the_acceptance_length() -> None:
    free = {"step_s": 1.0, "draft_pass_s": 1e-9, "piecewise_s": 0.0}  # the host alone takes time
    row = next(r for r in project(asked(), Overrides(pinned=free), draws=0).rows if r.k == 3)
    assert row.rollout_speedup.typical == pytest.approx(2.8, rel=0.03)


def test_a_draft_that_is_never_right_only_costs() -> None:
    answer = project(asked(acceptance={3: 1.0}), draws=0)
    assert all(row.rollout_speedup.typical < 1 for row in answer.rows if row.k > 0)
    free = project(asked(acceptance={3: 1.0}), Overrides(pinned={"piecewise_s": 0.0}), draws=0)
    auto, auto_free = (next(row for row in one.rows if row.k == AUTO) for one in (answer, free))
    assert not any(auto.table) and auto_free.rollout_speedup.typical == 1.0
    # no k pays, and yet each step takes 2.5 ms longer: 8 to 10 ms without the flag
    assert auto.rollout_speedup.typical == pytest.approx(0.77, abs=0.03)


def test_k_by_batch_size_is_no_slower_than_the_best_k_that_it_may_choose() -> None:
    rows = {row.k: row for row in project(asked(ks=(1, 2, 3, 4)), draws=0).rows}
    best_fixed = max(rows[k].rollout_speedup.typical for k in (1, 2, 3, 4))
    assert rows[AUTO].rollout_speedup.typical >= 0.97 * best_fixed


def test_more_acceptance_is_never_slower() -> None:
    speeds = [
        next(r for r in project(asked(acceptance={3: a}), draws=0).rows if r.k == 3).rollout_speedup.typical
        for a in (1.5, 2.0, 2.5, 3.0, 3.9)
    ]
    assert speeds == sorted(speeds)


questions = st.tuples(
    st.sampled_from(["Qwen3-8B", "Qwen3-30B-A3B"]),
    st.sampled_from(["H100", "B200", "L40S"]),
    st.integers(1, 400),  # responses
    st.integers(50, 4000),  # their mean
    st.sampled_from([1, 4, 64]),  # seats
)


def question_of(model: str, card: str, batch: int, mean: int, seats: int, **changed: object) -> Question:
    deployment = Deployment(find_model(model), find_card(card), tp=2)
    given = {"batch": batch, "lengths": lognormal(mean, 2 * mean), "seats": seats, "ks": (3,), "group": 1}
    return asked(deployment=deployment, **(given | changed))


@given(questions, st.floats(1.0, 4.0), st.floats(1.0, 4.0))
@settings(max_examples=40, deadline=None)
def test_whatever_is_asked_plain_is_one_and_more_acceptance_is_no_slower(
    of: tuple[str, str, int, int, int], one: float, other: float
) -> None:
    answers = [project(question_of(*of, acceptance={3: length}), draws=1) for length in sorted((one, other))]
    for answer in answers:
        plain = answer.rows[0]
        assert (plain.k, plain.tokens) == (0, 1.0)
        for span in (plain.rollout_speedup, plain.step_speedup):
            assert (span.low, span.typical, span.high) == (1.0, 1.0, 1.0)
        assert all(math.isfinite(row.rollout_s.high) and row.rollout_s.low > 0 for row in answer.rows)
    less, more = (answer.rows[1].rollout_speedup.typical for answer in answers)
    # what is drawn is the luck of each response, so that equal chances may differ by a step of the longest
    assert more >= less * (1 - 4 / of[3]) - 0.01


@given(questions, st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_a_larger_batch_takes_longer_and_no_longer_than_one_batch_after_the_other(
    of: tuple[str, str, int, int, int], times: int
) -> None:
    model, card, batch, mean, seats = of
    even = from_responses([float(mean)], "even")
    small, large = (
        project(question_of(model, card, n, mean, seats, lengths=even), draws=0) for n in (batch, times * batch)
    )
    for one, many in zip(small.rows[:1], large.rows[:1], strict=True):
        # each of the four engines may get one response more than its share, hence one more wave
        assert one.rollout_s.typical <= many.rollout_s.typical * 1.001
        assert many.rollout_s.typical <= (times + 1) * one.rollout_s.typical * 1.001


@given(st.integers(1, 4), st.integers(20, 200))
@settings(max_examples=20, deadline=None)
def test_a_batch_that_finds_no_room_at_once_runs_in_waves(waves: int, mean: int) -> None:
    """One engine, seats for four: each further four of equal length take as long as the first."""
    deployment = Deployment(find_model("Qwen3-8B"), find_card("H100"))
    even = from_responses([float(mean)], "even")

    def seconds(batch: int) -> float:
        question = asked(deployment=deployment, gpus=1, batch=batch, lengths=even, seats=4, prompt=0)
        return project(question, draws=0).rows[0].rollout_s.typical

    assert seconds(4 * waves) == pytest.approx(waves * seconds(4), rel=1e-6)


@pytest.mark.parametrize("acceptance", [1.5, 2.8])
def test_more_lag_makes_no_step_longer_and_exposes_no_more(acceptance: float) -> None:
    answers = [project(asked(acceptance={3: acceptance}, lag=lag, train_gpus=8), draws=0) for lag in (0, 1, 2, 4)]
    for k in range(len(answers[0].rows)):
        steps = [answer.rows[k].step_s.typical for answer in answers]
        exposed = [answer.rows[k].exposed_s.typical for answer in answers]
        assert all(later <= 1.01 * before for before, later in pairwise(steps)), (k, steps)
        assert all(later <= 1.01 * before + 0.01 for before, later in pairwise(exposed)), (
            k,
            exposed,
        )


def test_layers_that_look_back_only_so_far_are_named() -> None:
    config = QWEN_8B | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}
    assert shape_of(config, "windows").window == 128
    for none in ({"layer_types": ["full_attention"] * 36}, {"use_sliding_window": False}, {"sliding_window": None}):
        assert shape_of(config | none, "none").window == 0


def test_large_batches_are_drawn_less_often() -> None:
    assert asked().draws > asked(batch=65_536).draws >= 6
    assert asked(batch=1000, lag=4, train_gpus=8).responses == 4000


def test_the_typical_value_lies_in_its_range_and_ranges_are_no_points() -> None:
    for row in project(asked(), draws=8).rows[1:]:
        for span in (row.rollout_s, row.rollout_speedup, row.step_s, row.step_speedup):
            assert span.low <= span.typical <= span.high
        assert row.rollout_speedup.low < row.rollout_speedup.high


def test_what_is_printed_first_is_the_median_of_the_draws_and_the_range_holds_nine_of_ten() -> None:
    """Once it was what the most favourable constants give: 2.03, where 95 of 100 draws lie below."""
    spread = Estimate.of([float(i) for i in (100, *range(100))])
    assert (spread.typical, spread.low, spread.high) == (50.0, 5.0, 95.0)
    assert Estimate.of([3.0, 1.0]) == Estimate(2.0, 1.0, 3.0)


def test_cards_of_other_makers_and_of_china_have_their_data_sheets_numbers() -> None:
    h800, a800, mi300x = (find_card(name) for name in ("h800", "A800", "MI300X"))
    assert (h800.bandwidth, h800.flops, h800.link) == (3.35e12, 989e12, 200e9)  # an H100 with less NVLink
    assert (a800.bandwidth, a800.flops, a800.link) == (pytest.approx(2.039e12), 312e12, 200e9)
    assert (mi300x.bandwidth, mi300x.flops, mi300x.flops_8bit, mi300x.memory) == (5.3e12, 1307e12, 2615e12, 192e9)
    assert mi300x.source.startswith("AMD data sheet")


def test_a_model_of_the_hubs_cache_is_found_as_check_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_8B | {"num_hidden_layers": 2}))
    cached = {"someone/small": str(tmp_path / "config.json")}
    monkeypatch.setattr("spec_plugin_projection.shapes.in_hub_cache", cached.get)
    assert (find_model("someone/small").layers, find_model("someone/small").name) == (2, "someone/small")


def test_the_same_question_has_the_same_answer() -> None:
    assert project(asked(), draws=3) == project(asked(), draws=3)


def test_chances_go_through_every_acceptance_length_that_was_given() -> None:
    given = {3: 3.32, 5: 4.35, 7: 5.06}
    chances = chances_through(given)
    for k, length in given.items():
        assert tokens_per_step(chances, k) == pytest.approx(length, abs=1e-6)
    assert chances_through({3: 2.5}) == (pytest.approx(constant_acceptance(2.5, 3)),) * 3


@pytest.mark.parametrize("given", [{3: 3.0, 5: 2.9}, {1: 1.2, 3: 2.9}])
def test_acceptance_lengths_that_no_draft_can_have_together_are_refused(given: dict[int, float]) -> None:
    with pytest.raises(SpecConfigError, match="no draft has that"):
        chances_through(given)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"batch": -5}, "--batch -5: at least 1"),
        ({"gpus": 0}, "--gpus 0"),
        ({"batch": 10**9}, "--batch 1000000000: at most"),
        ({"acceptance": {3: math.nan}}, "--acceptance 3=nan"),
        ({"acceptance": {3: 4.5}}, "--acceptance 3=4.5: with 3 drafted tokens a step emits 1 to 4"),
        ({"acceptance": {3: 0.5}}, "--acceptance 3=0.5"),
        ({"acceptance": {}}, "no acceptance"),
        ({"lag": 1}, "--lag 1: .* give --train-gpus"),
        ({"ks": (0,)}, "--k 0"),
        ({"deployment": Deployment(find_model("Qwen3-8B"), find_card("H100"), tp=3)}, "no multiple of --tp 3"),
        ({"deployment": Deployment(find_model("Qwen3-8B"), find_card("H100"), ep=2)}, "--ep 2"),
        ({"deployment": Deployment(find_model("Qwen2.5-7B"), find_card("H100"), tp=8)}, "the 28 attention heads"),
        ({"lag": -1}, "--lag -1: at least 0"),
        ({"logprob_passes": -1}, "--logprob-passes -1: at least 0"),
    ],
)
def test_a_question_that_cannot_be_is_refused_in_a_sentence(changed: dict[str, object], word: str) -> None:
    with pytest.raises(SpecConfigError, match=word) as caught:
        asked(**changed)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------ stages, measurements


def test_stages_follow_each_other_at_lag_0_and_overlap_beyond() -> None:
    stages = Stages(prepare=1, generation=10, logprob=2, training=4, draft=1)
    assert (step_seconds(stages), exposed_seconds(stages)) == (18, 10)
    assert (step_seconds(stages, 1), exposed_seconds(stages, 1)) == (11, 3)
    trained = Stages(prepare=1, generation=5, logprob=2, training=4, draft=1)
    assert (step_seconds(trained, 1), exposed_seconds(trained, 1)) == (8, 0)


def test_training_takes_three_forward_passes_and_one_more_with_recomputation() -> None:
    model, card = find_model("Qwen3-8B"), find_card("H100")
    logprob, training = trainer_seconds(model, card, 8, 1e6, 2000, TYPICAL.but(recomputation=1.0))
    assert training == pytest.approx(3 * logprob)
    again = trainer_seconds(model, card, 8, 1e6, 2000, TYPICAL.but(recomputation=4 / 3))[1]
    assert again == pytest.approx(4 * logprob)
    assert logprob == pytest.approx(1e6 * model.forward_flops(1000) / (8 * 989e12 * TYPICAL.training_reached))


def test_twice_the_lag_hides_more_generation() -> None:
    steps = [project(asked(lag=lag, train_gpus=8), draws=0).rows[0].step_s.typical for lag in (0, 1, 2)]
    assert steps[0] > steps[1] >= steps[2] * 0.999


def test_a_measured_break_even_is_met_by_the_draft_pass() -> None:
    deployment = Deployment(find_model("Qwen3-8B"), find_card("H100"))
    slow = Roofline(deployment, TYPICAL.but(draft_pass_s=2e-3), 1000)
    seen = {b: (3, slow.seconds(b, 3) / slow.seconds(b, 0)) for b in (1, 8)}
    assert draft_pass_from(deployment, TYPICAL, seen, 1000).draft_pass_s == pytest.approx(2e-3)
    assert draft_pass_from(deployment, TYPICAL, {}, 1000) == TYPICAL


def timed(generation_s: float) -> Overrides:
    work = Work(responses=256, mean=2000, longest=8000, prompt=512)
    times = StepTimes(work, generation_s, 0, {}, 1e-6, 2e-6, 5.0)
    return Overrides(pinned={"piecewise_s": 0.0}, measured=Measured(times=times))


def test_what_a_run_of_this_deployment_took_takes_the_place_of_what_is_projected() -> None:
    projected = project(asked(), draws=0).stages.generation
    answer = project(asked(), timed(1.5 * projected), draws=0)
    tokens = 256 * (512 + 2000)
    assert answer.stages.generation == pytest.approx(1.5 * projected, rel=0.02)
    assert answer.stages.prepare == 5.0
    assert answer.stages.logprob == pytest.approx(tokens * 1e-6, rel=0.02)
    assert answer.stages.training == pytest.approx(tokens * 2e-6, rel=0.02)
    with_a_reference = project(asked(logprob_passes=2), timed(1.5 * projected), draws=0)
    assert with_a_reference.stages.logprob == pytest.approx(2 * answer.stages.logprob)
    twice = project(asked(batch=512), timed(1.5 * projected), draws=0)
    assert twice.stages.training == pytest.approx(2 * answer.stages.training)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_times_of_a_run_of_something_else_are_not_taken_and_that_is_said(factor: float) -> None:
    plain = project(asked(), Overrides(pinned={"piecewise_s": 0.0}), draws=0)
    answer = project(asked(), timed(factor * plain.stages.generation), draws=0)
    assert answer.rows == plain.rows
    assert answer.measured.times is None and "it was another deployment" in answer.measured.refused


def test_a_calibration_takes_the_place_of_the_roofline() -> None:
    steps = [StepTiming(b, k, k == 0, 0.01 * (1 + 0.1 * b + 0.2 * k), 50, 100.0) for b in (1, 8, 32) for k in (0, 1, 3)]
    cost = calibrated(steps)
    same = from_responses([1001] * 8, "all alike")
    answer = project(asked(gpus=8, batch=8, group=1, lengths=same, prompt=0), Overrides(cost=cost), draws=0)
    assert max(answer.phase.load) == 1  # one response an engine
    assert answer.rows[0].rollout_s.typical == pytest.approx(1000 * 0.011, rel=0.02)


class OfContext:
    """A step takes as many seconds as there are tokens before it; prefill as many as it has tokens."""

    def seconds(self, batch: int, k: int, paused: bool = True, context: float | None = None) -> float:
        return float(batch) if not context else batch + context


def test_the_context_of_a_step_grows_with_the_response() -> None:
    phase = simulate(rollout([10], prompt=4.0), OfContext(), (), 0, np.random.default_rng(0))
    # prefill, and nine steps that each see the prompt and what was decoded until their middle
    assert phase.seconds == pytest.approx(4 + sum(1 + 4 + at + 0.5 for at in range(9)))


def test_a_prompt_is_prefilled_once_for_its_group() -> None:
    alone, together = (Workload(np.full(8, 1.0), 5.0, group, 1, 64) for group in (1, 4))
    seconds = [simulate(r, OfContext(), (), 0, np.random.default_rng(0)).seconds for r in (alone, together)]
    assert seconds[0] - seconds[1] == pytest.approx(5.0 * 6)


def test_responses_of_a_group_stay_together() -> None:
    lengths = np.arange(48, dtype=float)
    for part in split(Workload(lengths, 0.0, 4, 3, 64), np.random.default_rng(1)):
        assert len(part) == 16
        for group in part.reshape(-1, 4).astype(int):
            assert group.tolist() == list(range(group[0], group[0] + 4)) and group[0] % 4 == 0


def test_the_tail_is_what_few_requests_generate() -> None:
    assert SimulatedPhase(1.0, {64: 640.0, 9: 20.0, 8: 80.0, 1: 10.0}).tail == pytest.approx(90 / 750)
