"""The plugin: which tokens it bets on, what stops a run, what ends the evidence, and what a checkpoint keeps."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.batches import batch_of
from builders.exactness import TARGET, Run, guard_of, states_of, synced
from builders.ranks import on_two_ranks

from draft_training import OtherRankFailed
from spec_plugin import LosslessError, hookimpl
from spec_plugin.api.events import Drafts, RolloutStats, WeightSync
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.policy.exactness.capital import Capital
from spec_plugin.policy.exactness.plugin import REFUSED, SAID

NOTHING = {"spec/exactness": 0.0, "spec/exactness_tokens": 0.0}


def test_law_2_a_right_engine_is_not_stopped_and_its_evidence_is_a_metric():
    run = Run()
    run.phases(30)
    found = run.metrics()
    assert found["spec/exactness_tokens"] == 30 * run.tokens and found["spec/exactness"] < 1.0


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_law_2_an_engine_that_samples_at_another_temperature_stops_the_run(temperature):
    run = Run(temperature=temperature, states_policy=True)
    with pytest.raises(
        LosslessError, match=r"evidence at a level of 1e-\d+.*A correct run is stopped with a chance of 1e-07"
    ):
        run.phases(40)


def test_what_is_sampled_and_stated_alike_from_another_distribution_is_warned_of_and_stops_nothing(caplog):
    run = Run(temperature=0.97, tokens=1000)
    run.phases(40)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "more than rounding explains" in line and "The run goes on" in line
    assert run.metrics()["spec/exactness"] < 1.0


def test_law_2_one_line_comes_before_the_refusal(caplog):
    run = Run()
    run.guard._capital = Capital(run.guard._capital.logs + math.log(10) * 3.1)
    for _ in range(2):
        run.guard._speak()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "The run stops at 1e-07" in line and "a level of 1e-3.1" in line and REFUSED < SAID


@pytest.mark.parametrize(
    "changed",
    [
        {"drafted": Drafts.OFF},
        {"drafted": Drafts.CONTROL},
        {"versions": -1},
        {"versions": 3},
        {"mask": False},
    ],
)
def test_only_drafted_tokens_of_the_version_that_recomputes_are_bet_on(changed: dict[str, Any]):
    run = Run()
    batch = run.batch(0)
    ((name, value),) = changed.items()
    run.guard.spec_check_logprobs(replace(batch, **{name: torch.full_like(getattr(batch, name), value)}))
    assert run.guard._tokens == 0 and run.guard._found == run.tokens, "they came back all the same"


@pytest.mark.parametrize(("passed", "missing"), [(-1, 0), (1, 0), (0, 1)], ids=["filtered", "doubled", "not judged"])
def test_a_phase_whose_tokens_did_not_all_come_back_once_is_no_evidence_and_several_end_it(passed, missing, caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    run = Run(temperature=0.5, states_policy=True)
    for _ in range(8):
        batch = run.batch(passed=run.tokens + passed, chosen=run.tokens + missing)
        run.phase(batch)
    assert run.metrics() == NOTHING
    (line,) = [r.getMessage() for r in caplog.records if "no evidence" in r.getMessage()]
    assert "chooses by what was sampled" in line and run.guard._head is None


def test_a_torn_phase_among_many_is_left_out_alone():
    run = Run()
    run.phases(8)
    run.phase(run.batch(passed=3))
    run.phases(4)
    assert run.metrics()["spec/exactness_tokens"] == 12 * run.tokens


def test_phases_without_a_log_prob_pass_are_nothing():
    run = Run()
    for version in range(5):
        run.sync(version)
    run.phases(2)
    assert run.metrics()["spec/exactness_tokens"] == 2 * run.tokens


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sampling": {"top_p": 0.9}}, "top_p or top_k"),
        ({"sampling": {"temperature": 0.0}}, "temperature=0"),
        (
            {"sampling": {"temperature": 0.9}, "engine_options": {"logprobs_mode": "raw_logprobs"}},
            "logprobs_mode=raw_logprobs",
        ),
        ({"sampling": {"allowed_token_ids": [1]}}, "allowed_token_ids"),
        ({"hf_config": {**TARGET.hf_config, "logit_scale": 0.5}}, "logit_scale"),
    ],
)
def test_where_there_can_be_none_it_is_said_once(changed, why, caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    guard = guard_of(replace(TARGET, **changed))
    for version in range(3):
        synced(guard, WeightSync(version, None, torch.zeros(4, 4)))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "no evidence of exact sampling" in line and why in line
    assert guard.spec_metrics() == NOTHING


def test_why_no_batch_has_states_is_said_once(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    run = Run()
    for _ in range(3):
        run.phase(replace(run.batch(), states=None, no_states="ranks share documents"))
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.endswith("(law 2): ranks share documents") and run.metrics() == NOTHING


def test_drafted_text_whose_pass_nobody_took_apart_is_said_and_text_without_drafts_is_not(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    run = Run()
    plain = run.batch()
    for _ in range(5):
        run.phase(replace(plain, states=None, drafted=torch.full_like(plain.drafted, Drafts.OFF)))
    assert not caplog.records
    for _ in range(4):
        run.phase(replace(plain, states=None))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "lately 0 for 200" in line and run.guard._head is None


def test_a_sync_without_a_head_has_none(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    synced(guard_of(TARGET), WeightSync(0, None, None))
    assert "no LM head" in caplog.text


def test_a_head_that_is_not_what_the_trainer_computes_with_ends_it():
    run = Run()
    batch = run.batch()
    run.phase(replace(batch, recomputed=batch.recomputed - 0.2))
    assert run.guard._head is None and run.metrics() == NOTHING


def test_stated_log_probs_that_are_far_off_are_the_other_guards_and_stop_nothing_here(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    run = Run(temperature=0.6)
    run.phases(5)
    assert run.metrics() == NOTHING and "states other log-probs" in caplog.text


def test_law_6_trouble_ends_the_evidence_and_stops_nothing(caplog):
    caplog.set_level(logging.INFO, logger="spec_plugin")
    run = Run()
    batch = run.batch()
    assert batch.states is not None
    run.phase(replace(batch, states=replace(batch.states, last=batch.states.last[:, :3])))
    assert "no evidence" in caplog.text and "RuntimeError" in caplog.text


def test_a_policy_that_drops_out_is_bet_on_weighed_alone():
    run = Run()
    batch = run.batch()
    assert batch.states is not None
    run.guard.spec_check_logprobs(replace(batch, states=replace(batch.states, noisy=True)))
    assert run.guard._grown[0].any() and not run.guard._grown[1].any()


def test_batches_without_states_or_stated_log_probs_are_passed_over():
    run = Run()
    run.guard.spec_check_logprobs(batch_of(0, torch.zeros(1, 3), torch.zeros(1, 3)))
    run.guard.spec_check_logprobs(replace(run.batch(), rollout=None))
    assert run.guard._passed == 0


def test_law_2_a_resumed_run_goes_on_with_its_capital(tmp_path: Path):
    run = Run(temperature=0.9, states_policy=True)
    run.phases(3)
    run.guard.spec_save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["exactness.json"]
    resumed = Run()
    resumed.guard.spec_load(tmp_path)
    assert resumed.metrics() == run.metrics()
    other = Run(target=replace(TARGET, sampling={"temperature": 0.8}))
    other.guard.spec_load(tmp_path)
    assert other.metrics() == NOTHING
    state = json.loads((tmp_path / "exactness.json").read_text())
    (tmp_path / "exactness.json").write_text(json.dumps({**state, "logs": state["logs"][:1]}))
    shorter = Run()
    shorter.guard.spec_load(tmp_path)
    shorter.guard.spec_load(tmp_path / "nothing")
    assert shorter.metrics() == NOTHING


def test_it_is_a_plugin_that_can_be_blocked():
    assert create_manager(load_entry_points=False).has_plugin("exactness")
    assert not create_manager(block=("exactness",), load_entry_points=False).has_plugin("exactness")


def test_what_the_guard_of_log_probs_refuses_is_not_bet_on():
    """Else a batch that the conformance kit has made wrong would count."""
    manager = create_manager(load_entry_points=False)
    order = [found.plugin_name for found in reversed(manager.hook.spec_check_logprobs.get_hookimpls())]
    assert order.index("provenance") < order.index("exactness")


def test_states_are_of_no_other_batch_than_the_whole_one():
    batch = replace(batch_of(0, torch.zeros(2, 3), None), states=states_of(torch.zeros(1, 2), torch.zeros(1)))
    assert batch.of(torch.tensor([0])).states is None


def halves(rank: int, temperature: float, ends: bool) -> tuple[str, dict[str, float]]:
    """One of two ranks, each with half of the tokens; the first hears how many there are."""
    run = Run(temperature=temperature, states_policy=True, tokens=100)
    try:
        for version in range(20):
            if rank == 0:
                run.guard.spec_rollout_end(RolloutStats(version, 1, 200, 1.0))
            if ends and rank == 1 and version == 2:
                run.guard._end("trouble of this rank")
            run.guard.spec_check_logprobs(run.batch())
            run.sync(version + 1)
    except LosslessError as error:
        return str(error), run.metrics()
    return "", run.metrics()


def test_law_2_all_ranks_add_up_their_tokens_and_stop_together(tmp_path):
    first, second = on_two_ranks(tmp_path, lambda rank: halves(rank, 0.8, False))
    assert first == second and "evidence at a level" in first[0]
    assert first[1]["spec/exactness_tokens"] % 200 == 0


def test_evidence_that_ends_on_one_rank_ends_on_all_and_nobody_waits(tmp_path):
    first, second = on_two_ranks(tmp_path, lambda rank: halves(rank, 1.0, True))
    assert first == second and first[1]["spec/exactness_tokens"] == 400


class Broken:
    """A plugin that fails in weight syncs."""

    @hookimpl
    def spec_weight_sync(self) -> None:
        raise ValueError("of the first rank alone")


def failing_on_the_first(rank: int) -> str:
    with pytest.raises((ValueError, OtherRankFailed)) as caught:
        synced(guard_of(TARGET), WeightSync(0, None, torch.zeros(4, 4)), *([Broken()] if rank == 0 else []))
    return type(caught.value).__name__


def test_law_6_a_plugin_that_fails_on_one_rank_leaves_no_other_waiting_for_its_sums(tmp_path):
    assert on_two_ranks(tmp_path, failing_on_the_first) == ["ValueError", "OtherRankFailed"]
