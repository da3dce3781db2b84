"""No kind of draft draws from the trainer's random streams: the policy's own samples and shuffles would change (law 1)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from draft_training import Document, DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings
from draft_training.mtp import MtpShape
from draft_training.small_lm import SmallLmShape

HF = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
}
KINDS = {"eagle3": (DraftConfig, 192), "draft_model": (SmallLmShape, 0), "mtp": (MtpShape, 64)}


def streams() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), tuple(map(str, numpy[1])), numpy[2:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_built_trained_and_judged_on_a_stream_of_its_own(kind: str, tmp_path: Any) -> None:
    shape, width = KINDS[kind]
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (40,), generator=stream)
    states = torch.randn(40, 64, generator=stream)
    aux = torch.randn(40, width, generator=stream)
    document = Document(ids, aux, states, torch.arange(40) > 4, 0)
    buffer = HiddenBuffer(4096, 1 << 24, 0)
    for _ in range(4):
        buffer.add(document)
    __import__("draft_training.small_lm_module")  # with transformers, which a trainer has imported long before
    before = streams()
    trainer = DraftTrainer(shape.from_target(HF), TrainSettings(), device="cpu", seed=0)
    assert streams() == before, "building it"
    trainer.update_policy(states[:1].repeat(64, 1), states[1:2].repeat(64, 1), 0)
    trainer.train_slice(buffer, float("inf"), 2)
    trainer.evaluate([document], 3)
    trainer.save(tmp_path / "draft")
    trainer.load(tmp_path / "draft")
    assert streams() == before
