"""What the tests of ``spec-plugin check`` point it at: verl's options, and a policy of 8 billion parameters."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from spec_plugin.plan.run_plan import Model

needs_verl = pytest.mark.skipif(not (find_spec("verl") and find_spec("hydra")), reason="reads verl's own configuration")
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
PATH = "actor_rollout_ref.model.path=Qwen/Qwen3-8B"
VLLM = "actor_rollout_ref.rollout.name=vllm"
SPEC = "+actor_rollout_ref.rollout.custom.spec."
ROLLOUT, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."


def a_qwen3(name: str) -> Model:
    return Model(name, QWEN3, "a test")
