"""How much more KV cache a draft takes is counted layer by layer: few keep the whole text, some keep one vector of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from draft_training import DraftConfig
from draft_training.mtp import MtpShape
from spec_plugin.commands.cache import kept, share
from spec_plugin.commands.forecast import _engine_memory
from spec_plugin.events import TargetInfo
from spec_plugin.run_plan import RunFacts

DENSE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
#: sizes of DeepSeek-V3: 576 numbers of a token in each of its layers, and keys and values of 8 heads of 128 in its draft's
LATENT = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
WINDOWS = {"num_hidden_layers": 24, "layer_types": ["sliding_attention", "full_attention"] * 12}
STATES = {"num_hidden_layers": 48, "full_attention_interval": 4, "architectures": ["Qwen3NextForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "3 % more KV cache (one layer beside 36)"),
        (LATENT, "6 % more KV cache (one layer beside 61 of latent attention)"),
        (WINDOWS, "8 % more KV cache (one layer beside 12 that keep the whole text)"),
        ({"layer_types": ["sliding_attention"] * 36}, "3 % more KV cache (one layer beside 36)"),
    ],
)
def test_a_new_drafts_layer_is_held_against_those_that_keep_the_whole_text(changes: dict[str, Any], said: str) -> None:
    target = DENSE | changes
    draft = DraftConfig.from_target(target).to_hf()
    assert share(draft, target) == said == share(draft, {"text_config": target})


def test_layers_that_keep_a_state_are_left_out_where_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for states, layers in ((True, 12), (False, 48)):
        monkeypatch.setattr("spec_plugin.commands.cache.keeps_states", lambda hf, states=states: states)
        found = kept(DENSE | STATES)
        assert found is not None and found.layers == layers


def test_of_a_layer_that_the_target_brings_its_own_config_json_is_told_and_not_counted() -> None:
    """Whatever that says beside sizes, as every published one does."""
    target = DENSE | {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"}
    target |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
    draft = MtpShape.from_target(target)
    run = cast(RunFacts, SimpleNamespace(target=TargetInfo("m", target, "bfloat16")))
    assert _engine_memory(run, draft).endswith("3 % more KV cache (one layer beside 36)")


def test_drafts_of_other_kinds() -> None:
    two = {"num_hidden_layers": 2, "num_attention_heads": 16, "head_dim": 64, "hidden_size": 1024}
    assert share(two, DENSE) == "6 % more KV cache (2 layers beside 36)"
    assert share(DENSE, DENSE, own_layer=True).startswith("3 % more KV cache (one layer"), "a layer of the target's own"
    assert share(DENSE, DENSE) == "100 % more KV cache (36 layers beside 36)", "a whole model that is as deep"
    assert share(two, {"hidden_size": 4}) == "", "it does not say how many layers it has"
    for odd in ({"rope_theta": [1]}, {"intermediate_size": [2]}, {"num_attention_heads": "many"}):
        assert share(two | odd, DENSE) == "" == share(two, DENSE | odd), odd
