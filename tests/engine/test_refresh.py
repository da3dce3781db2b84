"""Law 5 on a real engine: a refresh is all or nothing, never touches the target, and aborts no request."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import small
import torch
from refreshing import acceptance_length, push, target_bits

from draft_training import digest

pytestmark = pytest.mark.engine


def addresses(worker: Any) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in worker.get_draft_model().named_parameters()}


@pytest.fixture(scope="module", autouse=True)
def installed(llm, config):
    """Something known is served before the first test."""
    report = push(llm, small.draft_tensors(config, seed=7))
    assert report["installed"], report


def test_the_engine_asks_for_exactly_what_draft_training_sends(llm, config):
    info = small.rpc(llm, "spec_draft_info")
    tensors = small.draft_tensors(config, seed=1)
    required = {n: s for n, (s, _) in info["expected"].items() if n not in info["optional"]}
    assert required == {n: tuple(t.shape) for n, t in tensors.items()}
    assert info["shared"] == {"lm_head.weight": "lm_head.weight", "embed_tokens.weight": "model.embed_tokens.weight"}
    assert info["has_draft"] and info["problem"] is None and "Eagle3" in info["draft_class"]


def test_greedy_outputs_are_the_targets_own_with_any_draft(llm, config, greedy_reference):
    assert small.greedy(llm) == greedy_reference
    assert push(llm, small.good_tensors(config))["installed"]
    assert small.greedy(llm) == greedy_reference


def test_a_refresh_is_served_from_then_on(llm, config):
    assert push(llm, small.draft_tensors(config, seed=3))["installed"]
    assert acceptance_length(llm) < 1.3
    tensors = small.good_tensors(config)
    report = push(llm, tensors)
    assert report["installed"] and report["digest"] == digest(tensors) == small.live_digest(llm)
    length = acceptance_length(llm)
    print(f"\nacceptance length after the refresh: {length:.2f} of 4")
    assert length > 3.5


def test_a_refresh_changes_no_bit_of_the_target_and_moves_no_weight(llm, config):
    before, places = small.rpc(llm, target_bits), small.rpc(llm, addresses)
    assert push(llm, small.draft_tensors(config, seed=4))["installed"]
    after = small.rpc(llm, target_bits)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert small.rpc(llm, addresses) == places, "CUDA graphs remember addresses"


def bad(name: str, make: Any) -> Any:
    return lambda tensors: {**tensors, name: make(tensors.get(name))}


REFUSALS = {
    "torn": (lambda t: {n: x for n, x in t.items() if n != "fc.weight"}, {}, "torn: missing ['fc.weight']"),
    "wrong shape": (bad("fc.weight", lambda t: t[:, :-1].contiguous()), {}, "fc.weight has shape (64, 191)"),
    "NaN": (bad("norm.weight", lambda t: t * float("nan")), {}, "norm.weight is not finite"),
    "wrong digest": (dict, {"digest": "0" * 64}, "digest differs"),
    "stale": (dict, {"version": 0}, "stale: draft version 0"),
    "the target's head": (
        bad("lm_head.weight", lambda _: torch.zeros(320, 64)),
        {},
        "lm_head.weight is the target's own",
    ),
    "sent but not arrived": (
        dict,
        {"names": ["fc.weight", "gone.weight"]},
        "not both sent and arrived: ['gone.weight', ",
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_refused_refresh_leaves_everything_as_it_was(llm, config, greedy_reference, fault):
    make, options, expected = REFUSALS[fault]
    served, target = small.rpc(llm, "spec_draft_info"), small.rpc(llm, target_bits)
    live = small.live_digest(llm)
    report = push(llm, make(small.draft_tensors(config, seed=5)), **options)
    assert not report["installed"] and expected in report["reason"]
    assert (report["draft_version"], report["digest"]) == (served["draft_version"], served["digest"])
    assert small.live_digest(llm) == live and not small.rpc(llm, "spec_lost_draft")
    after = small.rpc(llm, target_bits)
    assert all(torch.equal(target[n], after[n]) for n in target)
    assert small.greedy(llm) == greedy_reference


def test_a_crash_in_the_middle_of_the_swap_restores_the_previous_draft(llm, config):
    live, version = small.live_digest(llm), small.rpc(llm, "spec_draft_info")["draft_version"]

    def break_loading(worker: Any) -> None:
        draft = worker.get_draft_model()
        load = draft.load_weights

        def half(weights: Any) -> None:
            load(list(weights)[:5])
            raise OSError("connection lost")

        draft.load_weights = half

    def repair_loading(worker: Any) -> None:
        del worker.get_draft_model().load_weights

    small.rpc(llm, break_loading)
    report = push(llm, small.draft_tensors(config, seed=6))
    small.rpc(llm, repair_loading)
    assert not report["installed"] and "connection lost" in report["reason"] and report["draft_version"] == version
    assert small.live_digest(llm) == live
    assert push(llm, small.draft_tensors(config, seed=6))["installed"], "the next one is welcome"


def test_a_lost_draft_is_noticed_and_can_be_put_back(llm, config):
    tensors = small.good_tensors(config)
    assert push(llm, tensors)["installed"] and not small.rpc(llm, "spec_lost_draft")

    def zero_one(worker: Any) -> None:  # as sleep level 2 does to all
        worker.get_draft_model().model.fc.weight.data.view(-1)[7] = 1.0

    small.rpc(llm, zero_one)
    assert small.rpc(llm, "spec_lost_draft")
    version = small.rpc(llm, "spec_draft_info")["draft_version"]
    assert not push(llm, tensors, version=version)["installed"], "the same version is stale"
    assert push(llm, tensors, version=version, force=True)["installed"]
    assert not small.rpc(llm, "spec_lost_draft")


def test_requests_in_flight_survive_a_refresh(llm, config, greedy_reference):
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=small.TOKENS, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(small.PROMPTS):
        engine.add_request(f"flight-{i}", {"prompt_token_ids": prompt}, params)
    finished: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
        steps += 1
        if steps in (3, 6, 9):  # in the middle: a good one, a bad one, a refused one
            tensors = small.good_tensors(config) if steps == 3 else small.draft_tensors(config, seed=steps)
            report = push(llm, tensors, digest="0" * 64 if steps == 9 else digest(tensors))
            assert report["installed"] == (steps != 9)
    outputs = [finished[f"flight-{i}"] for i in range(len(small.PROMPTS))]
    assert [o.finish_reason for o in outputs] == ["length"] * len(outputs)
    assert [list(o.token_ids) for o in outputs] == greedy_reference


def test_refreshes_are_quick(llm, config):
    reports = [push(llm, small.draft_tensors(config, seed=s)) for s in range(20, 40)]
    assert all(r["installed"] for r in reports)
    median = statistics.median(r["milliseconds"] for r in reports)
    parameters = sum(t.numel() for t in small.good_tensors(config).values())
    print(f"\nmedian refresh of {parameters} parameters: {median:.1f} ms")
    assert median < 500
