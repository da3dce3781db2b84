"""How long a text may be by a model's config.json is what vLLM says."""

from __future__ import annotations

from typing import Any

import pytest

from draft_training.rope import Rope, derived_length

HF = {
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


ROPES: list[tuple[Any, int]] = [
    (None, 512),
    ({"rope_type": "default", "rope_theta": 1e4}, 512),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 1024),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}, 1024),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
        512,
    ),
    ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 2048),
]


def test_a_field_that_vllm_prefers_bounds_a_text() -> None:
    assert derived_length({**HF, "model_max_length": 2048}) == ("model_max_length", 2048)
    assert derived_length({**HF, "max_seq_len": 300}) == ("max_seq_len", 300)


def test_of_two_ropes_the_older_name_counts() -> None:
    """As in transformers 5, which takes ``rope_scaling`` in place of ``rope_parameters``, theta and all."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    both = {**HF, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": rope}
    assert derived_length(both) == ("max_position_embeddings", 1024)
    read = Rope.from_hf(both)
    assert (read.type, read.factor, read.theta) == ("yarn", 4.0, 1e4)
    assert Rope.from_hf({**both, "rope_theta": 5e5}).theta == 5e5


@pytest.mark.parametrize(("rope", "most"), ROPES)
def test_the_longest_sequence_follows_the_rotary_scaling(rope: Any, most: int) -> None:
    assert derived_length({**HF, "rope_parameters": rope}) == ("max_position_embeddings", most)


@pytest.mark.parametrize("bad", [10**400, float("inf"), float("nan"), -1, "4"])
def test_numbers_that_are_none_bound_nothing(bad: Any) -> None:
    assert derived_length({**HF, "max_position_embeddings": bad}) is None
    assert derived_length({**HF, "rope_scaling": {"type": "linear", "factor": bad}}) is None
    assert (
        derived_length({**HF, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": bad}})
        is None
    )


# against vLLM's own classes


def vllm_model_config(**change: Any) -> Any:
    pytest.importorskip("vllm.config.model")  # before the next, which imports it
    from transformers import Qwen3Config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = Qwen3Config(
        **{**HF, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "num_hidden_layers": 1, **change}
    )
    return config, ModelArchConfigConvertorBase(config, config).convert()


@pytest.mark.parametrize(("rope", "most"), ROPES)
def test_vllm_refuses_the_same_lengths(rope: Any, most: int) -> None:
    config, arch = vllm_model_config(rope_parameters=rope) if rope else vllm_model_config()
    from vllm.config.model import _get_and_verify_max_len

    def asked(length: int) -> int:
        return _get_and_verify_max_len(config, arch, None, length, False, None)

    assert asked(most) == most
    with pytest.raises(ValueError, match="max_model_len"):
        asked(most + 1)
