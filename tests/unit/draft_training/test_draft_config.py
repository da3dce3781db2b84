from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.drafts import TINY

from draft_training import DraftConfig, DraftConfigError, Rope, validate_draft
from draft_training.model import inverse_frequencies, rotary
from draft_training.outside import logit_cap
from draft_training.rope import derived_length

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}


def target(**changes):
    return {**TINY, **changes}


def test_a_target_without_head_dim_gets_hidden_over_heads():
    raw = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
    config = DraftConfig.from_target(raw)
    assert (config.head_dim, config.num_kv_heads) == (4, 4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "a family of tomorrow", None])
def test_nobody_asks_for_a_targets_name_or_its_windows(family):
    made = DraftConfig.from_target(target(model_type=family, sliding_window=512, use_sliding_window=True))
    assert made == DraftConfig.from_target(target()) and made.aux_layers == (2, 4, 5)


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_sizes_of_a_target_of_parts_are_those_of_its_part_for_texts(name):
    whole = {"model_type": "some_vl", "vision_config": {"hidden_size": 7}, name: TINY}
    config = DraftConfig.from_target(whole)
    assert config == DraftConfig.from_target(TINY)
    validate_draft(config, whole)
    with pytest.raises(DraftConfigError, match="hidden_size=16 differs"):
        validate_draft(config, {name: target(hidden_size=32)})


@pytest.mark.parametrize("experts", ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"])
def test_the_draft_of_a_target_with_experts_is_dense_and_of_a_sensible_width(experts):
    def width(**changes):
        return DraftConfig.from_target(target(**{experts: 8}, **changes)).intermediate_size

    hidden = TINY["hidden_size"]
    assert width(intermediate_size=None) == width(intermediate_size=hidden) == 3 * hidden
    assert width(intermediate_size=3 * hidden + 8) == 3 * hidden + 8  # that of its dense layers


def test_a_dense_target_must_say_its_mlps_width():
    with pytest.raises(DraftConfigError, match="lacks intermediate_size"):
        DraftConfig.from_target(target(intermediate_size=None))


@pytest.mark.parametrize(("hidden", "size", "heads"), [(7168, 128, (56, 8, 128)), (2048, None, (16, 8, 128))])
def test_a_target_with_latent_attention_gets_plain_heads(hidden, size, heads):
    config = DraftConfig.from_target(
        target(hidden_size=hidden, kv_lora_rank=512, v_head_dim=size, head_dim=None, num_attention_heads=128)
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_parameters": None, "rope_theta": 3e4},
        {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 3e4}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 3e4}},
        {"partial_rotary_factor": 0.25, "rope_parameters": None, "rope_theta": 3e4},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 3e4}}},
    ],
)
def test_a_new_draft_has_plain_rope_with_the_targets_theta_where_the_targets_is_not_plain(changes):
    assert DraftConfig.from_target(target(**changes)).rope == Rope(3e4)


def test_llama_4_whose_factors_are_equal_gets_a_plain_one() -> None:
    level = {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    assert DraftConfig.from_target(target(rope_parameters=level | {"rope_theta": 5e5})).rope == Rope(5e5)
    assert DraftConfig.from_target(target(rope_parameters=LLAMA3)).rope.type == "llama3"


def test_rope_theta_is_read_from_either_place():
    old = {k: v for k, v in TINY.items() if k != "rope_parameters"}
    assert DraftConfig.from_target({**old, "rope_theta": 5e5}).rope.theta == 5e5
    new = target(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert DraftConfig.from_target(new).rope.theta == 1e6
    scaled = {**old, "rope_theta": 5e5, "rope_scaling": LLAMA3}
    assert DraftConfig.from_target(scaled).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    legacy = {**old, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    assert DraftConfig.from_target(legacy).rope == Rope(5e5, "linear", 2.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_scaling_of_a_given_draft_that_we_cannot_match_is_refused(kind):
    with pytest.raises(DraftConfigError, match=kind):
        Rope.from_hf(target(rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}))


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN, {**YARN, "truncate": False}],
    ids=lambda s: s["rope_type"] + ("" if s.get("truncate", True) else " not truncated"),
)
def test_rope_equals_transformers_bit_by_bit(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = target(head_dim=64, rope_parameters={**scaling, "rope_theta": 5e5})
    config = DraftConfig.from_target(raw)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**config.to_hf()))
    assert torch.equal(inverse_frequencies(config.rope, 64, torch.device("cpu"))[0], theirs.inv_freq)
    positions = torch.arange(300)
    cos, sin = theirs(torch.zeros(1, 300, 1), positions[None])
    ours = rotary(config.rope, 64, positions, torch.float32)
    assert torch.equal(ours[0], cos[0]) and torch.equal(ours[1], sin[0])


def test_yarn_that_is_not_read_alike_everywhere_is_refused_in_a_draft_and_left_out_of_a_new_one():
    for strange in ({"mscale": 1.0, "mscale_all_dim": 1.0}, {"attention_factor": 1.0}):
        raw = target(rope_parameters={**YARN, **strange, "rope_theta": 3e4})
        with pytest.raises(DraftConfigError, match=next(iter(strange))):
            Rope.from_hf(raw)
        assert DraftConfig.from_target(raw).rope == Rope(3e4)


def test_a_draft_is_not_given_positions_beyond_its_yarn():
    raw = target(rope_parameters={**YARN, "rope_theta": 3e4}, max_position_embeddings=4097)
    assert DraftConfig.from_target(raw).rope == Rope(3e4)
    good = DraftConfig.from_target(raw | {"max_position_embeddings": 4096})
    assert good.rope.type == "yarn"
    assert derived_length(good.to_hf() | {"max_position_embeddings": 4097}) == ("max_position_embeddings", 4096)


def test_a_shallow_target_gets_distinct_layers_and_a_draft_that_names_none_is_refused_with_the_fix():
    made = DraftConfig.from_target(target(num_hidden_layers=6))
    assert made.aux_layers == (1, 3, 5)
    nameless = {k: v for k, v in made.to_hf().items() if "aux_hidden" not in k}
    with pytest.raises(DraftConfigError, match=r"6 layers: name them as eagle_aux_hidden_state_layer_ids"):
        DraftConfig.from_hf(nameless, target_layers=6)
    assert DraftConfig.from_target(target(num_hidden_layers=4), aux_layers=(0, 1, 3)).aux_layers == (0, 1, 3)


@pytest.mark.parametrize("ids", [(5, 2, 4), (2, 2, 4), (2, 4, 8), (-1, 2), ()])
def test_aux_layers_must_be_ascending_distinct_and_within_the_target(ids):
    with pytest.raises(DraftConfigError, match="aux_layers"):
        DraftConfig.from_target(TINY, aux_layers=ids)


def test_a_target_config_with_gaps_is_refused_by_key():
    with pytest.raises(DraftConfigError, match="lacks hidden_size"):
        DraftConfig.from_target(target(hidden_size=None))


@pytest.mark.parametrize(
    ("name", "sizes", "fits"),
    [  # vocabulary, hidden size, intermediate size, heads, their groups, their width
        ("Qwen3-0.6B", (151936, 1024, 3072, 16, 8, 128), 16384),
        ("Qwen3-8B", (151936, 4096, 12288, 32, 8, 128), 32768),
        ("SmolLM2-135M", (49152, 576, 1536, 9, 3, 64), 8192),
        ("a Llama of old", (32000, 4096, 11008, 32, 32, 128), 32000),
        ("a toy", (320, 96, 192, 4, 2, 32), 320),
    ],
)
def test_unasked_a_head_is_pruned_to_what_the_rest_of_the_draft_weighs(name, sizes, fits):
    vocabulary, hidden, mlp, heads, groups, width = sizes
    config = DraftConfig(vocabulary, vocabulary, hidden, mlp, heads, groups, width, (2, 16, 30))
    assert config.fitting_vocabulary == fits, name
    assert fits == vocabulary or fits * hidden <= config.parameters
    assert replace(config, draft_vocab_size=fits).fitting_vocabulary == fits, "whatever it is pruned to now"


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(DraftConfigError, match="draft_vocab_size=41"):
        DraftConfig.from_target(TINY, draft_vocab_size=41)


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}],
    ids=lambda s: s["rope_type"],
)
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
    for option in ("norm_before_fc", "fc_norm", "attention_bias"):
        with pytest.raises(DraftConfigError, match=option):
            DraftConfig.from_hf({**tiny.to_hf(), option: True})
    with pytest.raises(DraftConfigError, match="num_hidden_layers=2"):
        DraftConfig.from_hf({**tiny.to_hf(), "num_hidden_layers": 2})


def test_a_config_without_aux_layers_needs_the_target(tiny):
    raw = {k: v for k, v in tiny.to_hf().items() if k != "eagle_aux_hidden_state_layer_ids"}
    with pytest.raises(DraftConfigError, match="give the target's config"):
        DraftConfig.from_hf(raw)
    assert DraftConfig.from_hf(raw, target_layers=8).aux_layers == (2, 4, 5)


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"vocab_size": 41}, {"num_hidden_layers": 5}])
def test_a_draft_of_another_target_is_refused(tiny, changes):
    validate_draft(tiny, TINY)
    with pytest.raises(DraftConfigError):
        validate_draft(tiny, target(**changes))


def test_a_draft_with_a_window_is_not_read_as_one_that_sees_all(tiny):
    """vLLM gives it the window; in training it would learn to look further than it can."""
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    with pytest.raises(DraftConfigError, match="sets sliding_window=16, which this trainer does not implement"):
        DraftConfig.from_hf({**tiny.to_hf(), **windowed})
    assert DraftConfig.from_hf({**tiny.to_hf(), **windowed, "layer_types": ["full_attention"]}) == tiny
    assert DraftConfig.from_hf({**tiny.to_hf(), "sliding_window": 16}) == tiny, (
        "without layer_types vLLM's Llama has none"
    )


@pytest.mark.parametrize(
    "change", [{"logit_scale": 0.5}, {"logits_scaling": 8.0}, {"lm_head_multiplier": 2.0}, {"dim_model_base": 256}]
)
def test_a_target_that_scales_its_logits_is_refused_and_one_that_caps_them_is_not(change):
    (name,) = change
    with pytest.raises(DraftConfigError, match=f"{name}=.* scales its logits"):
        logit_cap({"text_config": target(**change)})
    assert logit_cap(target(final_logit_softcapping=30.0)) == 30.0 and logit_cap(target()) is None
