"""A draft of pruned vocabulary on a card, in a file of its own: with an engine that ends vLLM takes its groups of ranks away."""

from __future__ import annotations

import itertools
from dataclasses import replace

import drawn
import pytest
import small
import torch
from on_card import DEVICE, DTYPE, K, start

from draft_training import DraftTrainer, TrainSettings, save_draft

pytestmark = pytest.mark.gpu


def test_samples_of_a_pruned_draft_are_the_policys_while_its_vocabulary_and_temperature_change(
    target, config, policy, tmp_path
):
    few = replace(config, draft_vocab_size=small.VOCAB // 4)
    trainer = DraftTrainer(few, TrainSettings(), device=DEVICE, seed=0)
    trainer.update_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight, 0)
    drafts = []
    for favourites in (torch.arange(small.VOCAB), -torch.arange(small.VOCAB)):
        trainer.select_vocabulary(favourites + small.VOCAB)
        drafts.append({name: tensor.cpu() for name, tensor in trainer.engine_tensors(DTYPE).items()})
    assert not torch.equal(*(draft["d2t"] for draft in drafts))
    save_draft(tmp_path / "draft", few, drafts[0])
    started = start(target, tmp_path / "draft")
    try:
        started.set_k(K)
        turns = itertools.cycle(itertools.product(drafts, (1.0, 0.0)))
        drawn.asked(started.llm, temperature=1.5)
        rows = drawn.finished(
            started.llm, lambda step: drawn.put_in_force(started.llm, *next(turns)) if step % 2 else None
        )
        assert drawn.drafted(started.llm)[0] > 0
        drawn.assert_the_policys(rows, policy, 1.5)
    finally:
        started.close()
