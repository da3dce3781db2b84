"""Which proposals a run's draft makes: what training's replay promises most, without flapping, and only where the engine can."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from draft_training import DRAFT_TEMPERATURES, Evaluation, Sampled
from draft_training.proposals import ProposalStats
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.policy.proposals import Proposals

K = 8


def proposals(engine: str = "probabilistic", **sampling: Any) -> Proposals:
    target = TargetInfo("", {}, "float32", sampling=sampling)
    return Proposals(SpecConfig(k=K), target, Method("eagle3", {"draft_sample_method": engine}))


def found(**chances: float) -> Evaluation:
    """A replay of a million rounds, in which each way to propose has one chance throughout; 0.1 where none is named."""
    each = [chances.get(f"t{t:g}".replace(".", "_"), 0.1) for t in DRAFT_TEMPERATURES] + [0.9]
    rounds = torch.full((len(each),), 1e6, dtype=torch.float64)
    powers = torch.tensor(each, dtype=torch.float64)[:, None] ** torch.arange(1, K + 1)
    stats = ProposalStats(rounds[:, None] * powers, rounds, torch.tensor(5e5), torch.tensor(1e6))
    return Evaluation(stats, 1000, 0.1)


def test_the_first_measurement_decides_and_the_report_is_about_what_was_chosen(caplog):
    caplog.set_level(logging.INFO)
    chosen = proposals(temperature=1.0)
    assert chosen.draft_temperature == 1.0, "before anything is known the draft draws as the policy does"
    report = chosen.judged(found(t0=0.7, t1=0.5))
    assert chosen.draft_temperature == 0.0
    assert report.chances[0] == pytest.approx(0.7) and report.draft_temperature == 0.0
    assert "its likeliest tokens" in caplog.text


def test_another_temperature_must_promise_3_percent_more_twice_in_a_row():
    chosen = proposals()
    chosen.judged(found(t1=0.6))
    for sharper in (0.61, 0.7, 0.6, 0.7):  # hardly more, more once, no more, more once
        chosen.judged(found(t1=0.6, t0_85=sharper))
        assert chosen.draft_temperature == 1.0
    chosen.judged(found(t1=0.6, t0_85=0.7))
    assert chosen.draft_temperature == 0.85


def test_two_that_take_turns_at_promising_more_change_nothing():
    chosen = proposals()
    chosen.judged(found(t1=0.6))
    for _ in range(4):
        chosen.judged(found(t1=0.6, t0_85=0.7))
        chosen.judged(found(t1=0.6, t0_7=0.7))
    assert chosen.draft_temperature == 1.0


def test_a_user_who_asks_for_draws_gets_them_and_the_promise_is_about_these():
    target = TargetInfo("", {}, "float32")
    config = SpecConfig(k=K, draft_sample_method="probabilistic")
    asked = Proposals(config, target, Method("eagle3", {"draft_sample_method": "probabilistic"}))
    assert asked.judged(found(t0=0.9, t1=0.4)).chances[0] == pytest.approx(0.4)
    assert asked.draft_temperature == 1.0


def test_draws_must_pay_for_what_drawing_takes():
    chosen = proposals()
    chosen.judged(found(t0=0.6, t1=0.61))
    assert chosen.draft_temperature == 0.0


def test_a_draft_that_knows_nothing_decides_nothing():
    chosen = proposals()
    chosen.judged(found())
    assert chosen.draft_temperature == 1.0
    chosen.judged(found(t0=0.5))
    assert chosen.draft_temperature == 0.0, "the first that promises anything is no second thought"


def test_the_rollouts_filters_are_replayed_as_vllm_applies_them():
    assert proposals(temperature=0.7, top_k=20, top_p=0.9).sampling == Sampled(0.7, 20, 0.9)
    assert proposals(top_k=-1, top_p=1.0).sampling == proposals().sampling == Sampled()


@pytest.mark.parametrize(
    ("engine", "sampling", "stays"),
    [
        ("greedy", {}, 0.0),
        ("probabilistic", {"temperature": 0.0}, 1.0),
        ("probabilistic", {"allowed_token_ids": [1, 2]}, 1.0),
    ],
)
def test_where_the_engine_or_the_rollouts_leave_no_choice_nothing_is_replayed_for_it(engine, sampling, stays):
    fixed = proposals(engine, **sampling)
    assert fixed.sampling is None
    fixed.judged(found(t0_5=0.9, t0=0.8))
    assert fixed.draft_temperature == stays


def test_a_resumed_run_goes_on_with_its_temperature():
    resumed = proposals()
    resumed.resume(0.7)
    assert resumed.draft_temperature == 0.7
    resumed.judged(found(t0_7=0.6, t0=0.7))
    assert resumed.draft_temperature == 0.7, "it has been judged before"
    for nonsense in (None, 0.3, "hot"):
        resumed.resume(nonsense)
    assert resumed.draft_temperature == 0.7
    greedy = proposals("greedy")
    greedy.resume(0.7)
    assert greedy.draft_temperature == 0.0, "of a run whose engine drew its proposals"
