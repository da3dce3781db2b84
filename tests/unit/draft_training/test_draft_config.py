from __future__ import annotations

import pytest
import torch
from draft_helpers import TINY

from draft_training import DraftConfig, DraftConfigError, Rope, validate_draft
from draft_training.model import inverse_frequencies, rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def target(**changes):
    return {**TINY, **changes}


def test_a_target_without_head_dim_gets_hidden_over_heads():
    raw = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
    config = DraftConfig.from_target(raw)
    assert (config.head_dim, config.num_kv_heads) == (4, 4)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_dense_families_are_accepted(family):
    assert DraftConfig.from_target(target(model_type=family, sliding_window=None)).aux_layers == (2, 4, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "mistral"},  # 4096 is what transformers takes then
        {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True},
    ],
)
def test_a_target_with_an_attention_window_is_refused(changes):
    with pytest.raises(DraftConfigError, match=f"sliding_window={changes.get('sliding_window', 4096)}"):
        DraftConfig.from_target(target(**changes))


def test_a_window_that_is_not_used_is_none():
    for changes in ({"model_type": "qwen2", "use_sliding_window": False}, {"model_type": "llama"}):
        assert DraftConfig.from_target(target(sliding_window=512, **changes)).num_heads


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "seed_oss", None])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(DraftConfigError, match=f"model_type={family!r}"):
        DraftConfig.from_target(target(model_type=family))


def test_rope_theta_is_read_from_either_place():
    old = {k: v for k, v in TINY.items() if k != "rope_parameters"}
    assert DraftConfig.from_target({**old, "rope_theta": 5e5}).rope.theta == 5e5
    new = target(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert DraftConfig.from_target(new).rope.theta == 1e6
    scaled = {**old, "rope_theta": 5e5, "rope_scaling": LLAMA3}
    assert DraftConfig.from_target(scaled).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    legacy = {**old, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    assert DraftConfig.from_target(legacy).rope == Rope(5e5, "linear", 2.0)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_rope_scaling_that_we_cannot_match_is_refused(kind):
    with pytest.raises(DraftConfigError, match=kind):
        DraftConfig.from_target(target(rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}))


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=lambda s: s["rope_type"]
)
def test_rope_equals_transformers_bit_by_bit(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = target(head_dim=64, rope_parameters={**scaling, "rope_theta": 5e5})
    config = DraftConfig.from_target(raw)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**config.to_hf()))
    assert torch.equal(inverse_frequencies(config.rope, 64), theirs.inv_freq)
    positions = torch.arange(300)
    cos, sin = theirs(torch.zeros(1, 300, 1), positions[None])
    ours = rotary(config.rope, 64, positions, torch.float32)
    assert torch.equal(ours[0], cos[0]) and torch.equal(ours[1], sin[0])


def test_a_too_shallow_target_is_refused_with_the_fix():
    with pytest.raises(DraftConfigError, match=r"6 layers.*set aux_layers"):
        DraftConfig.from_target(target(num_hidden_layers=6))
    assert DraftConfig.from_target(target(num_hidden_layers=4), aux_layers=(0, 1, 3)).aux_layers == (0, 1, 3)


@pytest.mark.parametrize("ids", [(5, 2, 4), (2, 2, 4), (2, 4, 8), (-1, 2), ()])
def test_aux_layers_must_be_ascending_distinct_and_within_the_target(ids):
    with pytest.raises(DraftConfigError, match="aux_layers"):
        DraftConfig.from_target(TINY, aux_layers=ids)


def test_a_target_config_with_gaps_is_refused_by_key():
    with pytest.raises(DraftConfigError, match="lacks hidden_size"):
        DraftConfig.from_target(target(hidden_size=None))


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(DraftConfigError, match="draft_vocab_size=41"):
        DraftConfig.from_target(TINY, draft_vocab_size=41)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_config_json_round_trips(rope):
    config = DraftConfig.from_target(
        target(rope_parameters={**rope, "rope_theta": 2e4}), draft_vocab_size=12, aux_layers=(1, 3)
    )
    assert DraftConfig.from_hf(config.to_hf()) == config


def test_config_json_says_how_many_hidden_states_vllm_must_expect():
    raw = DraftConfig.from_target(TINY, aux_layers=(1, 3)).to_hf()
    assert raw["num_aux_hidden_states"] == 2 and raw["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["max_position_embeddings"] == 128


def test_options_that_we_cannot_train_are_refused(tiny):
    for option in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias"):
        with pytest.raises(DraftConfigError, match=option):
            DraftConfig.from_hf({**tiny.to_hf(), option: True})
    with pytest.raises(DraftConfigError, match="num_hidden_layers=2"):
        DraftConfig.from_hf({**tiny.to_hf(), "num_hidden_layers": 2})


def test_a_config_without_aux_layers_needs_the_target(tiny):
    raw = {k: v for k, v in tiny.to_hf().items() if k != "eagle_aux_hidden_state_layer_ids"}
    with pytest.raises(DraftConfigError, match="give the target's config"):
        DraftConfig.from_hf(raw)
    assert DraftConfig.from_hf(raw, target_layers=8).aux_layers == (2, 4, 5)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 32}, {"vocab_size": 41}, {"num_hidden_layers": 5}, {"max_position_embeddings": 4096}]
)
def test_a_draft_of_another_target_is_refused(tiny, changes):
    validate_draft(tiny, TINY)
    with pytest.raises(DraftConfigError):
        validate_draft(tiny, target(**changes))
