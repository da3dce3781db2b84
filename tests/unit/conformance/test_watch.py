from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders.session import TARGET
from builders.spec_run import run_of
from spec_plugin_conformance import watch
from spec_plugin_conformance.journal import read_trace
from spec_plugin_conformance.plants import LOGPROB, PERTURBED, VERSION, PlantedErrors
from spec_plugin_conformance.recorder import Recorder, log_probs_of
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob

from draft_training import digest
from spec_plugin import SpecConfig
from spec_plugin.api.events import HiddenStates, WeightSync
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.decoder import Decoder
from spec_plugin.trainer.harvest import DecoderHarvest


def output(*tokens: int, index: int = 0) -> SimpleNamespace:
    """Like vLLM's ``RequestOutput``: of each token, its log-prob among others."""
    found = [{t: SimpleNamespace(logprob=-t / 8), 99: SimpleNamespace(logprob=-1.0)} for t in tokens]
    sample = SimpleNamespace(index=index, token_ids=list(tokens), logprobs=found)
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[sample])


def answer(kind: str, *outputs: SimpleNamespace) -> watch.CollectedOutput:
    found = watch.CollectedOutput(SimpleNamespace(output_kind=SimpleNamespace(name=kind)))
    for one in outputs:
        found.add(one)
    return found


def test_an_answer_is_the_same_whether_vllm_sends_it_whole_or_in_parts():
    parts = answer("DELTA", output(1, 2), output(3), output(5, index=1))
    whole = answer("CUMULATIVE", output(1, 2), output(5, index=1), output(1, 2, 3))
    assert parts.log_probs == whole.log_probs == [-0.125, -0.25, -0.375, -0.625]
    assert parts.prompt == 3


def test_tokens_without_log_probs_are_counted():
    silent = output(1, 2)
    silent.outputs[0].logprobs = None
    assert answer("FINAL_ONLY", silent).log_probs == [None, None]


def test_only_the_first_tokens_log_prob_is_falsified():
    found = output(1, 2)
    watch.perturb(found, PERTURBED)
    assert answer("FINAL_ONLY", found).log_probs == [PERTURBED, -0.25]


def test_sampling_options_are_compared_by_what_they_change():
    assert watch.sampling_of({"temperature": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 9}) == {}
    assert watch.sampling_of({"temperature": 0.7, "top_k": 5}) == {"temperature": 0.7, "top_k": 5}


@pytest.mark.parametrize(
    ("asked", "plain"),
    [(None, 0), ({"x": 1}, 0), ({"spec_off": True}, 9), ({"spec_off": [2, 5]}, 3), ({"spec_off": [4, 80]}, 5)],
)
def test_tokens_that_were_to_be_sampled_without_drafts_are_counted(asked, plain):
    assert watch.undrafted(asked, 9) == plain
    assert watch.undrafted({"spec_off": [20, 30]}, 9) == 0


class Engine:
    version: int | None = None


def test_a_policy_version_is_late_only_while_that_is_planted(tmp_path):
    plants, engine = PlantedErrors(tmp_path), Engine()
    watch.delay_version(f"{__name__}:Engine.version", plants)
    assert engine.version is None
    engine.version = 4
    plants.plant(VERSION)
    assert engine.version == 3
    plants.remove(VERSION)
    plants.plant(LOGPROB)
    assert engine.version == 4


@pytest.fixture
def session(tmp_path):
    plugins = (f"spec_plugin_conformance.recorder:Recorder={tmp_path}",)
    config = SpecConfig.parse({"serve": "always", "train_tokens": 32, "plugins": plugins})
    return SpecSession(config, TARGET, create_manager((), config.plugins, load_entry_points=False))


def test_metrics_are_seen_as_they_are_handed_out(session, tmp_path):
    values = session.metrics()
    assert values
    assert [e["values"] for e in read_trace(tmp_path) if e["hook"] == "handed_metrics"] == [values]


def test_updates_of_the_policy_are_seen_and_those_of_the_draft_are_not(session, tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    seen = [e for e in read_trace(tmp_path) if e["hook"] == "policy_update"]
    assert [e["optimizer"] for e in seen] == ["SGD"]
    vocab, hidden = TARGET.hf_config["vocab_size"], TARGET.hf_config["hidden_size"]
    head = torch.randn(vocab, hidden)
    session.weight_sync(WeightSync(0, head, head))
    aux = len(session.method.harvest) * hidden
    ids = torch.arange(32)
    states = HiddenStates(ids, torch.randn(32, aux), torch.randn(32, hidden), ids > 3, (32,), 0)
    session.target_forward(states)
    session.train_draft(0, 1.0)
    trace = read_trace(tmp_path)
    assert len([e for e in trace if e["hook"] == "policy_update"]) == 1
    (sync,) = [e for e in trace if e["hook"] == "spec_weight_sync"]
    assert sync["head_digest"] == digest({"": head})
    (harvest,) = [e for e in trace if e["hook"] == "spec_target_forward"]
    assert harvest["log_probs"] == log_probs_of(states, head)


def test_their_log_probs_are_those_of_the_runs_temperature(tmp_path):
    recorder = Recorder(str(tmp_path))
    recorder._target = replace(TARGET, sampling={"temperature": 0.5})
    recorder._head = torch.randn(8, 4)
    ids, last = torch.arange(5), torch.randn(5, 4)
    states = HiddenStates(ids, last.clone(), last, ids > 2, (5,), 1)
    recorder.spec_target_forward(states)
    (harvest,) = [e for e in read_trace(tmp_path) if e["hook"] == "spec_target_forward"]
    assert harvest["log_probs"] == log_probs_of(states, 2 * recorder._head)


def test_hidden_states_stand_for_log_probs_of_the_sampled_tokens_document_by_document():
    head, last = torch.randn(8, 4), torch.randn(5, 4)
    ids, mask = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([False, True, True, False, True])
    found = log_probs_of(HiddenStates(ids, last, last, mask, (3, 2), 1), head)
    expected = (last @ head.T).log_softmax(-1)
    assert found[0] == pytest.approx([float(expected[0, 2]), float(expected[1, 3])])
    assert found[1] == pytest.approx([float(expected[3, 5])])


def test_what_a_weight_sync_announced_is_looked_at_again_after_the_update(session, tmp_path):
    vocab, hidden = TARGET.hf_config["vocab_size"], TARGET.hf_config["hidden_size"]
    weight = torch.randn(vocab, hidden)
    session.weight_sync(WeightSync(0, weight.clone(), weight))
    session.train_draft(0, 0.0)
    weight += 1.0
    session.train_draft(1, 0.0)
    changed = [e["changed"] for e in read_trace(tmp_path) if e["hook"] == "spec_train_draft"]
    assert changed == [[], ["head"]]


def test_each_new_budget_of_a_harvest_is_noted_by_the_recorder_of_its_session(session, tmp_path):
    control = run_of(session, None)
    harvest = DecoderHarvest(control, lambda: Decoder([torch.nn.Identity()] * 8, torch.nn.Identity()))
    harvest.open()
    harvest.open()
    assert [e["hook"] for e in read_trace(tmp_path)].count("harvest_opened") == 2


def configured():
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=8, logprobs_mode="x", logits_processors=None),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.fixture
def no_engine_yet(monkeypatch):
    monkeypatch.setattr(watch, "_numbers", {})
    monkeypatch.setattr(watch, "_configured", set())


def test_engines_of_one_process_are_told_apart(tmp_path, no_engine_yet):
    async def generate(self, prompt, sampling_params, request_id, **kwargs):
        yield output(1, 2)

    written = []
    watched = watch._wrap_generate(
        generate, PlantedErrors(tmp_path), lambda hook, **what: written.append((hook, what)), {}
    )
    params = SamplingParams(temperature=1.0)

    async def ask(engine):
        return [answer async for answer in watched(engine, "p", params, "id")]

    first, second = (SimpleNamespace(vllm_config=configured()) for _ in range(2))
    for engine in (first, second, first):
        asyncio.run(ask(engine))
    assert [what["engine"] for hook, what in written if hook == "engine_request_begins"] == [0, 1, 0]
    assert [hook for hook, _ in written].count("engine_configured") == 2


def test_a_batch_of_a_synchronous_engine_is_seen_as_its_requests_are(tmp_path, no_engine_yet):
    """Requests where they are added, whoever steps them; answers where ``LLM.generate`` gives them; on their front's clock."""
    written = []

    def write(hook, **what):
        written.append((hook, what))

    engine = SimpleNamespace(vllm_config=configured())
    add_request = watch._wrap_add_request(lambda self, name, prompt, params: name, write, {"logprobs_mode": "x"})

    def vllms_own(self, prompts, sampling_params=None, use_tqdm=True):
        for name in "ab":
            add_request(self.llm_engine, name, {}, sampling_params[0])
        return [output(1, 2), output(3)]

    plants = PlantedErrors(tmp_path)
    generate = watch._wrap_batch(vllms_own, plants, write)
    params = [SamplingParams(temperature=1.0, logprobs=0, extra_args=extra) for extra in (None, {"spec_off": [0, 1]})]
    front = SimpleNamespace(
        engine=SimpleNamespace(vllm_config=engine.vllm_config)
    )  # another object before the same engine
    token = watch._clock.set(front)
    try:
        generate(SimpleNamespace(llm_engine=engine), ["p", "q"], params, use_tqdm=False)
    finally:
        watch._clock.reset(token)
    hooks = [hook for hook, _ in written]
    assert hooks == [
        "engine_configured",
        "engine_request_begins",
        "engine_request_begins",
        "engine_request",
        "engine_request",
    ]
    begins, requests = written[1:3], [what for _, what in written[3:]]
    assert all(what == {"test": False, "clock": "own", "engine": 0} for _, what in begins)
    assert [len(r["log_probs"]) for r in requests] == [2, 1] and [r["plain"] for r in requests] == [0, 1]
    assert {r["engine"] for r in requests} == {0} and not any(r["test"] for r in requests)


def test_a_wrong_log_prob_is_planted_in_flat_lists_too():
    said = FlatLogprobs()
    for token, log_prob in ((5, -1.0), (6, -2.0)):
        said.append({token: Logprob(log_prob, 1, None)})
    watch.perturb(SimpleNamespace(outputs=[SimpleNamespace(logprobs=said, token_ids=[5, 6])]), PERTURBED)
    assert [said[i][token].logprob for i, token in enumerate((5, 6))] == [PERTURBED, -2.0]
