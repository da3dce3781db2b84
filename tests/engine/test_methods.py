"""Other drafting methods on a real engine: exact, measured, paused and refreshed like the first one."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runner
import small
import torch
from builders import frozen
from method_engines import K, counted, engine_with, method_of, set_k, steps
from safetensors.torch import save_file
from spec_plugin_conformance import tiny

from draft_training import DraftTrainer, HiddenBuffer, TrainSettings, digest
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
from spec_plugin.methods import suffix

pytestmark = pytest.mark.engine


@pytest.mark.v1("ngram")
def test_ngram_is_exact_uneven_and_obeys_the_table(target: Path, greedy_reference: list[list[int]]) -> None:
    llm = engine_with(target, method_of(target, method="ngram"))
    set_k(llm, K)
    said, drafts, _ = counted(llm)
    assert said == greedy_reference and drafts == 0, "the policy counts on in steps of 37: nothing occurs twice"

    # half of the prompts have begun to repeat themselves, so their continuation is there to be looked up
    chains = [[(9 * i + 37 * n) % small.VOCAB for n in range(20)] for i in range(6)]
    prompts = [chain + chain[:4] if i % 2 else chain[:6] for i, chain in enumerate(chains)]
    steps(llm)
    before = read_spec_counters()
    looked_up = greedy(llm, prompts)
    after = read_spec_counters()
    drafts, accepted = (after[n] - before[n] for n in ("drafts", "accepted_tokens"))
    forwards = sum(s.batch * s.steps for s in steps(llm) if s.k == K)
    assert 0 < drafts < forwards, "forward passes that found nothing are timed all the same"
    assert accepted > drafts, "what is looked up is what the policy says"

    set_k(llm, 0)
    before = read_spec_counters()
    assert greedy(llm, prompts) == looked_up
    assert read_spec_counters()["drafts"] == before["drafts"]
    assert {(s.k, s.paused) for s in steps(llm)} == {(0, True)}


def greedy(llm: Any, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.v1("suffix")
@pytest.mark.skipif(importlib.util.find_spec(suffix.PACKAGE) is None, reason=suffix.INSTALL)
def test_suffix_remembers_what_each_prompt_was_answered(target: Path, greedy_reference: list[list[int]]) -> None:
    llm = engine_with(target, method_of(target, method="suffix"))
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    assert type(drafter.suffix_cache).__name__ == "PromptTrees"
    small.rpc(llm, "spec_forget_rollouts")
    set_k(llm, 0)
    said, drafts, _ = counted(llm)
    assert said == greedy_reference and drafts == 0
    rounds, would = small.rpc(llm, "spec_take_shadow")
    assert rounds > 6 * small.TOKENS / 2 and sum(would) < rounds / 4, "nothing was said before"
    taken = small.rpc(llm, "spec_take_rollouts")
    asked = [np.frombuffer(prompt, dtype=np.int32).tolist() for prompt, _ in taken]
    answered = {tuple(a): np.frombuffer(r, dtype=np.int32).tolist() for a, (_, r) in zip(asked, taken, strict=True)}
    assert answered == {tuple(p): g for p, g in zip(small.PROMPTS, greedy_reference, strict=True)}

    said, drafts, _ = counted(llm)  # once more with k = 0: what drafting would accept now
    rounds, would = small.rpc(llm, "spec_take_shadow")
    assert said == greedy_reference and drafts == 0 and rounds <= 6 * (small.TOKENS // (K + 1) + 1)
    small.rpc(llm, "spec_take_rollouts")
    for k in (K, 1):
        set_k(llm, k)
        steps(llm)
        said, drafts, accepted = counted(llm)
        forwards = sum(s.batch * s.steps for s in steps(llm) if s.k == k)
        assert said == greedy_reference
        assert accepted == k * drafts >= 6 * (small.TOKENS - K - 2) // (k + 1) * k, "all that was drafted was right"
        assert drafts <= forwards + 6, "as many as the table says"
        small.rpc(llm, "spec_take_rollouts")
    assert small.rpc(llm, "spec_take_shadow")[0] == 0, "nothing is imagined while there are drafts"

    small.rpc(llm, "spec_forget_rollouts")  # an engine that is new, after a resume
    small.rpc(llm, "spec_remember", taken)
    set_k(llm, K)
    said, drafts, accepted = counted(llm)
    assert said == greedy_reference and accepted == K * drafts > 0


@pytest.mark.v1("draft_model")
@pytest.mark.parametrize("tied", [False, True])
def test_a_small_model_is_exact_and_refreshed_whole(
    target: Path, greedy_reference: list[list[int]], tied: bool, tmp_path: Path
) -> None:
    newborn = method_of(target, method="draft_model").draft
    assert newborn is not None
    shape = type(newborn.config)(newborn.config.hidden_size, {**newborn.config.to_hf(), "tie_word_embeddings": tied})
    given = DraftTrainer(shape, TrainSettings(), device="cpu", seed=1)
    given.kind.write(tmp_path, given.engine_tensors())
    llm = engine_with(target, method_of(target, method="draft_model", draft=str(tmp_path)))
    set_k(llm, K)
    said, drafts, _ = counted(llm)
    assert said == greedy_reference and drafts > 0
    assert small.live_digest(llm) == digest(given.engine_tensors()), "what was given is served"
    other = DraftTrainer(shape, TrainSettings(), device="cpu", seed=2).engine_tensors()
    report = small.install(llm, other, 1)
    assert report["installed"], report["reason"]
    assert small.live_digest(llm) == digest(other)
    assert counted(llm)[0] == greedy_reference
    torn = dict(list(other.items())[1:])
    assert "torn" in small.install(llm, torn, 2)["reason"]
    assert all(torch.isfinite(t).all() for t in other.values())


def make_mimo(folder: Path) -> Path:
    """The counting policy as a Qwen2, with a layer for multi-token prediction beside it."""
    target = small.make_target(folder, family="qwen2")
    tiny.add_mtp_layer(target, seed=1)
    return target


def test_the_targets_own_layer_is_exact_refreshed_and_the_one_that_is_trained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from examples.bench.workload import harvest

    target = make_mimo(tmp_path / "mimo")
    reference = small.reference(target)
    method = method_of(target, method="mtp")
    assert method.draft is not None and method.draft.tensors is not None
    llm = engine_with(target, method)
    set_k(llm, K)
    said, drafts, _ = counted(llm)
    assert said == reference and drafts > 0
    assert small.rpc(llm, "spec_draft_info")["problem"] is None
    assert small.live_digest(llm) == digest(method.draft.tensors), "what the checkpoint holds is served"

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    rows = [(prompt, answer) for prompt, answer in zip(small.PROMPTS, reference, strict=True)]
    assert method.harvest is not None
    documents = harvest(model, rows, method.harvest)
    trainer = DraftTrainer(
        method.draft.config, TrainSettings(ttt_steps=K), device="cpu", seed=1, tensors=method.draft.tensors
    )
    trainer.update_policy(model.get_input_embeddings().weight, model.get_output_embeddings().weight, 0)
    buffer = HiddenBuffer(1 << 20, 1 << 30, 0)
    for document in documents:
        buffer.add(document)
    trainer.train_slice(buffer, float("inf"), 60)
    trained = trainer.engine_tensors()
    report = small.install(llm, trained, 1)
    assert report["installed"], report["reason"]
    said, drafts, accepted = counted(llm)
    assert said == reference
    predicted = trainer.evaluate(documents, K)
    assert predicted.acceptance_length > 2.0, "it has learnt the text by heart"
    # the replay leaves out the last round of each response, which is cut short; otherwise it is the engine's own arithmetic
    assert 1 + accepted / drafts == pytest.approx(predicted.acceptance_length, abs=0.25)
    torn = dict(list(trained.items())[1:])
    assert "torn" in small.install(llm, torn, 2)["reason"]


_AUX = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "num_aux_hidden_states": 3, "target_hidden_size": 64}
FROZEN = {
    "EAGLE-1": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1},
    "EAGLE-3 of two layers": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "draft_vocab_size": small.VOCAB,
        **_AUX,
    },
    "P-EAGLE": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "draft_vocab_size": small.VOCAB,
        "mask_token_id": 300,
        "pard_token": 300,
        **_AUX,
    },
    "DFlash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 300, "use_aux_hidden_state": True},
        "block_size": 4,
        "num_target_layers": 8,
        "layer_types": ["full_attention"] * 2,
    },
}


def fill_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2 of vLLM 0.29 leaves ``draft_load_config`` unread; here drafts are noise in any case."""
    from vllm.config.load import LoadConfig
    from vllm.v1.worker.gpu.spec_decode.dflash import utils as dflash
    from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle

    for module in (eagle, dflash):
        load = functools.partial(module.get_model, load_config=LoadConfig(load_format="dummy"))
        monkeypatch.setattr(module, "get_model", load)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.v1(k)) if k == "P-EAGLE" else k for k in FROZEN])
def test_a_frozen_draft_of_any_kind_is_exact_and_obeys_the_table(
    kind: str, target: Path, greedy_reference: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights (vLLM's load_format=dummy), since it is vLLM that runs them: hardly a token is accepted."""
    if runner.V2:
        fill_with_noise(monkeypatch)
    hf = json.loads((target / "config.json").read_text())
    hf = {name: value for name, value in hf.items() if name not in ("layer_types", "max_window_layers")}
    (tmp_path / "config.json").write_text(json.dumps({**hf, **FROZEN[kind]}))
    layout = {"EAGLE-1": "eagle", "DFlash": "dflash"}.get(kind, "eagle3")
    save_file(frozen.tensors_of(layout, FROZEN[kind]["num_hidden_layers"]), tmp_path / "model.safetensors")
    method = method_of(target, method="frozen", draft=str(tmp_path), train=False)
    told = method.speculative_config() | {"draft_load_config": {"load_format": "dummy"}}
    llm = engine_with(target, dataclasses.replace(method, settings=told, model=lambda: None))
    for k in (K, 0, K) if method.all_or_nothing_k else (K, 1, 0, 2):
        set_k(llm, k)
        steps(llm)
        said, drafts, _ = counted(llm)
        assert said == greedy_reference, f"k={k}"
        assert (drafts > 0) == (k > 0)
        assert {s.k for s in steps(llm)} <= {k}
