"""An engine with the flag on a card: its graphs, each k, exactness by counts, refreshes under captured graphs, sleep, memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import drawn
import pytest
import small
import torch
from on_card import DEVICE, DTYPE, DTYPE_NAME, FAR, HERE, REQUESTS, K, assert_likeliest, graphs, in_dtype
from refreshing import acceptance_length, push, send_target, target_bits

from draft_training import digest, fingerprint

pytestmark = pytest.mark.gpu
MIB = 2.0**20
SELF_TEST_S = 30.0 if HERE else 12.0


def assert_graphs_served(seen: Any) -> None:
    """Left out of a rehearsal."""
    if HERE:
        assert seen.replayed, "no captured graph was replayed"
        assert not seen.captured, "graphs are captured at start, and not while requests run"


def greedy_rows(started: Any) -> list[drawn.Row]:
    return list(zip(small.PROMPTS, small.greedy(started.llm), strict=True))


# ---- smoke


def test_the_engine_starts_with_the_runner_that_was_foretold_and_with_captured_graphs(started):
    from spec_plugin.plan.model_runner import runner_of

    facts, mode = started.engine.rpc("bench_facts"), started.config.compilation_config.cudagraph_mode
    print(f"\n{facts}; {len(started.graphs.captured)} graphs, {started.config.speculative_config}")
    v2 = facts["runner"] == "V2"
    settings = started.front.session.method.settings
    if HERE:
        assert runner_of(settings, "cuda").v2 == v2
        assert len(set(started.graphs.captured)) > K + 1
        assert mode.has_full_cudagraphs() if v2 else mode.name != "NONE"
    assert small.rpc(started.llm, "spec_draft_info")["problem"] is None


@pytest.mark.parametrize("k", [K, 1, 2, 0, K])
def test_each_k_drafts_as_many_tokens_and_replays_graphs(started, policy, good, k):
    """At 0 the draft is paused, and goes on afterwards."""
    from spec_plugin.engine.vllm.schedule.counters import read_spec_counters

    assert push(started.llm, good)["installed"]
    started.set_k(k)
    before = read_spec_counters()
    with graphs() as seen:
        timing = started.engine.run(small.PROMPTS, 0.0, small.TOKENS)
    after = read_spec_counters()
    drafts, tokens = after["drafts"] - before["drafts"], after["draft_tokens"] - before["draft_tokens"]
    print(f"\nk={k}: {drafts} drafts, {tokens} tokens, graphs {sorted(Counter(seen.replayed).values())}")
    assert_graphs_served(seen)
    assert_likeliest(list(zip(small.PROMPTS, timing.outputs, strict=True)), policy)
    assert (k - 1 < tokens / drafts <= k) if k else drafts == 0
    started.set_k(K)
    assert acceptance_length(started.llm) > 3.5


def test_k_that_changes_while_requests_run_changes_no_text(started, policy, good):
    assert push(started.llm, good)["installed"]
    core = started.llm.llm_engine.engine_core.engine_core
    table = itertools.cycle([[0], [K], [1], [2]])

    def switch() -> None:
        core.spec_set_schedule(next(table) * (REQUESTS + 1), [1.0] * (REQUESTS + 1), 0.0)

    timing = started.engine.run(small.PROMPTS, 0.0, 2 * small.TOKENS, switch)
    started.set_k(K)
    assert_likeliest(list(zip(small.PROMPTS, timing.outputs, strict=True)), policy)


def test_the_self_test_passes(started, good):
    """The plugin's own, in which k changes and the draft is paused while requests run."""
    from spec_plugin.lifecycle.blocking import run_blocking

    assert push(started.llm, good)["installed"]
    report = run_blocking(started.front.self_test(SELF_TEST_S))
    print("", *report.checks, sep="\n  ")
    started.set_k(K)
    assert report.passed, report.failures()


# ---- exactness


def test_greedy_tokens_are_those_of_transformers_with_any_draft(started, config, policy, good):
    for tensors in (in_dtype(small.draft_tensors(config, seed=2)), good):
        assert push(started.llm, tensors)["installed"]
        assert_likeliest(greedy_rows(started), policy)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 1.0), (1.5, 1.0), (1.5, 0.9)])
@pytest.mark.parametrize("draft_temperature", [1.0, 0.5, 0.0])
def test_samples_are_the_policys_at_every_draft_temperature(
    started, policy, good, draft_temperature, temperature, top_p
):
    drawn.put_in_force(started.llm, good, draft_temperature)
    before = drawn.drafted(started.llm)
    with graphs() as seen:
        drawn.asked(started.llm, temperature=temperature, top_p=top_p)
        rows = drawn.finished(started.llm)
    steps, accepted = (now - then for now, then in zip(drawn.drafted(started.llm), before, strict=True))
    print(f"\nT {temperature}, top_p {top_p}, draft {draft_temperature}: {1 + accepted / steps:.3f} tokens a step")
    assert_graphs_served(seen)
    assert accepted / steps > 0.3, "the test needs a draft that is accepted"
    drawn.assert_the_policys(rows, policy, temperature, top_p)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_transformers(started, target, good, temperature):
    from examples.bench.card_parts.score import Scorer

    assert push(started.llm, good)["installed"]
    found = small.generate(started.llm, temperature, 2 * small.TOKENS, logprobs=0)
    rows = [(prompt, list(one.token_ids)) for prompt, one in zip(small.PROMPTS, found, strict=True)]
    scored = torch.tensor(Scorer(target, DTYPE_NAME, DEVICE.type).score(rows, temperature))
    stated = torch.tensor(
        [[at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)] for one in found]
    )
    apart = (stated - scored).abs()
    print(f"\nT {temperature}: mean {float(apart.mean()):.2g}, largest {float(apart.max()):.2g} nats")
    assert bool(torch.isfinite(stated).all()) and float(apart.mean()) < FAR


# ---- a refresh under captured graphs


def places(worker: Any) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in worker.get_draft_model().named_parameters()}


@pytest.mark.parametrize("room", ["on the card", "on the host"])
def test_a_refresh_is_proposed_from_at_once_and_touches_nothing_else(started, config, good, room, monkeypatch):
    """Checked and backed up beside the draft, or on the host where the card has no room."""
    asked: list[Any] = []
    if HERE:
        free = torch.cuda.mem_get_info
        monkeypatch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda *on: (asked.append(on), (0, 1) if room == "on the host" else free(*on))[1],
        )
    before, at = small.rpc(started.llm, target_bits), small.rpc(started.llm, places)
    assert push(started.llm, in_dtype(small.draft_tensors(config, seed=3)))["installed"]
    with graphs() as seen:
        assert acceptance_length(started.llm) < 1.3
        report = push(started.llm, good)
        length = acceptance_length(started.llm)
    print(f"\n{room}: acceptance length {length:.2f} of {K + 1}, installed in {report['milliseconds']:.1f} ms")
    assert_graphs_served(seen)
    assert report["installed"] and report["digest"] == digest(good) == small.live_digest(started.llm)
    assert length > 3.5
    assert bool(asked) == HERE, "the card was asked for its room"
    after = small.rpc(started.llm, target_bits)
    assert all(torch.equal(before[n], after[n]) for n in before) and small.rpc(started.llm, places) == at


def test_a_refused_refresh_leaves_the_draft_before_it(started, good):
    assert push(started.llm, good)["installed"]
    report = push(started.llm, {**good, "norm.weight": good["norm.weight"] * math.nan})
    assert not report["installed"] and "norm.weight is not finite" in report["reason"]
    assert small.live_digest(started.llm) == digest(good) and acceptance_length(started.llm) > 3.5


def test_weights_that_were_trained_on_the_card_arrive_by_the_front(started, config, policy):
    """As TRL sends them: from the trainer's memory, by a file in shared memory, checked by the fingerprint that both make."""
    from draft_training import DraftTrainer, TrainSettings
    from spec_plugin.api.events import DraftRefresh
    from spec_plugin.lifecycle.blocking import run_blocking

    trainer = DraftTrainer(config, TrainSettings(), device=DEVICE, seed=3)
    trainer.update_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight, 0)
    sent = trainer.engine_tensors(DTYPE)
    assert {t.device.type for t in sent.values()} == {DEVICE.type}
    refresh = DraftRefresh(next(drawn.versions), 1, sent, fingerprint(sent))
    report = run_blocking(started.front.install_tensors(refresh, force=True))
    assert report.installed, report.reason
    host = {name: tensor.cpu() for name, tensor in sent.items()}
    assert fingerprint(host) == refresh.digest and small.live_digest(started.llm) == digest(host)


def test_captured_graphs_read_the_draft_temperature_where_it_lies(started, good):
    """This draft knows the policy: drawn as the policy is, nearly all is accepted; at half of its temperature, where nothing but
    the number in device memory differs, or greedily, little of a flat policy's tokens is, and all of a sharp one's.
    """
    if started.config.speculative_config.draft_sample_method != "probabilistic":
        pytest.skip("this vLLM draws no proposals on the runner that it chose")
    made = []
    with graphs() as seen:
        for temperature, draft_temperature in ((1.5, 1.0), (1.5, 0.5), (1.5, 0.0), (0.3, 0.0), (1.5, 1.0)):
            drawn.put_in_force(started.llm, good, draft_temperature)
            before = drawn.drafted(started.llm)
            drawn.asked(started.llm, temperature=temperature)
            drawn.finished(started.llm)
            steps, accepted = (now - then for now, then in zip(drawn.drafted(started.llm), before, strict=True))
            made.append(accepted / steps)
    print(f"\naccepted of {K}: {made}")
    assert_graphs_served(seen)
    first, sharper, greedy, sure, again = made
    assert sharper < first / 2 and greedy < first / 2 and abs(again - first) < 0.3, made
    assert sure > 0.97 * K, made


# ---- sleep


@pytest.mark.parametrize("level", [1, 2, 2])
def test_sleep_gives_memory_back_and_what_wakes_is_whole(started, target, policy, good, level):
    """Weights are woken, sent where they were dropped, the draft is refreshed, the KV cache is woken: both trainers' order."""
    from safetensors.torch import load_file

    llm = started.llm
    assert push(llm, good)["installed"]
    assert_likeliest(greedy_rows(started), policy)
    before, version = small.rpc(llm, target_bits), small.rpc(llm, "spec_draft_info")["draft_version"]
    before = {name: tensor.cpu() for name, tensor in before.items()}
    free = torch.cuda.mem_get_info()[0] if HERE else 0
    started.sleep(level)
    if HERE:
        freed = torch.cuda.mem_get_info()[0] - free
        print(f"\nlevel {level}: {freed / MIB:.0f} MiB given back")
        assert freed > 256 * MIB
    started.engine.wake_up("weights")
    assert small.rpc(llm, "spec_lost_draft") == (level == 2)
    if level == 2:
        send_target(llm, load_file(target / "model.safetensors"))
        report = push(llm, good, version=version, force=True)
        assert report["installed"], report
    started.engine.wake_up("kv_cache")
    after = small.rpc(llm, target_bits)
    assert all(torch.equal(before[n], after[n].cpu()) for n in before)
    assert small.live_digest(llm) == digest(good) and not small.rpc(llm, "spec_lost_draft")
    with graphs() as seen:
        rows = greedy_rows(started)
        assert acceptance_length(llm) > 3.5
    assert_graphs_served(seen)
    assert_likeliest(rows, policy)


# ---- memory


def test_graphs_take_no_more_than_vllms_profile_counted(started):
    def of_worker(worker: Any) -> dict[str, Any]:
        names = ("cudagraph_memory_estimate", "requested_memory", "available_kv_cache_memory_bytes")
        return {name: getattr(worker, name, None) for name in names}

    told = small.rpc(started.llm, of_worker)
    taken, counted = sum(started.graphs.nbytes), told["cudagraph_memory_estimate"]
    print(f"\n{len(started.graphs.captured)} captures took {taken / MIB:.0f} MiB; vLLM's profile: {told}")
    if counted is None or not HERE:
        return  # this vLLM, or this device, counts none
    assert taken <= 1.5 * counted + 128 * MIB, "graphs take memory that vLLM has given to the KV cache"
