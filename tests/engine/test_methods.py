"""Other drafting methods on a real engine: exact, measured, paused and refreshed like the first one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from draft_training import DraftTrainer, TrainSettings, digest
from spec_plugin import SpecConfig
from spec_plugin.engine.additional import with_own_settings
from spec_plugin.engine.schedule.counters import read_spec_counters
from spec_plugin.engine.schedule.scheduler import SCHEDULER
from spec_plugin.events import StepTiming, TargetInfo
from spec_plugin.manager import built_in_method
from spec_plugin.method import Method

pytestmark = pytest.mark.engine
K, SEQS = 3, 16


def method_of(target: Path, **options: Any) -> Method:
    hf = json.loads((target / "config.json").read_text())
    info = TargetInfo(path=str(target), hf_config=hf, dtype="float32", max_num_seqs=SEQS)
    found = built_in_method(SpecConfig.parse({"k": K, **options}), info)
    assert found is not None
    return found


def engine_with(target: Path, method: Method) -> Any:
    return small.start_engine(
        target,
        target,
        speculative_config=method.speculative_config(),
        scheduler_cls=SCHEDULER,
        **with_own_settings({}, ragged=method.ragged),
    )


def set_k(llm: Any, k: int) -> None:
    core = llm.llm_engine.engine_core.engine_core
    core.spec_set_schedule([k] * (SEQS + 1))
    core.spec_pause(k == 0)


def steps(llm: Any) -> list[StepTiming]:
    return [StepTiming(*row) for row in llm.llm_engine.engine_core.engine_core.spec_take_steps()]


def counted(llm: Any) -> tuple[list[list[int]], int, int]:
    """What it says greedily; drafts and accepted tokens."""
    before = read_spec_counters()
    said = small.greedy(llm)
    after = read_spec_counters()
    return said, after["drafts"] - before["drafts"], after["accepted_tokens"] - before["accepted_tokens"]


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


@pytest.mark.parametrize("tied", [False, True])
def test_a_small_model_is_exact_and_refreshed_whole(
    target: Path, greedy_reference: list[list[int]], tied: bool, tmp_path: Path
) -> None:
    newborn = method_of(target, method="draft_model").draft
    assert newborn is not None
    shape = type(newborn.config)(newborn.config.hidden_size, {**newborn.config.to_hf(), "tie_word_embeddings": tied})
    given = DraftTrainer(shape, TrainSettings(), device="cpu", seed=1)
    shape.write(tmp_path, given.engine_tensors())
    llm = engine_with(target, method_of(target, method="draft_model", draft=str(tmp_path)))
    set_k(llm, K)
    said, drafts, _ = counted(llm)
    assert said == greedy_reference and drafts > 0
    assert small.rpc(llm, "spec_live_digest") == digest(given.engine_tensors()), "what was given is served"
    other = DraftTrainer(shape, TrainSettings(), device="cpu", seed=2).engine_tensors()
    small.rpc(llm, "spec_stage", 1, list(other.items()))
    report = small.rpc(llm, "spec_install", 1, digest=digest(other), names=list(other))
    assert report["installed"], report
    assert small.rpc(llm, "spec_live_digest") == digest(other)
    assert counted(llm)[0] == greedy_reference
    torn = dict(list(other.items())[1:])
    small.rpc(llm, "spec_stage", 2, list(torn.items()))
    assert "torn" in small.rpc(llm, "spec_install", 2, digest=digest(torn), names=list(torn))["reason"]
    assert all(torch.isfinite(t).all() for t in other.values())
