"""Where an engine holds the weights of a checkpoint: names and packing as vLLM has them, and two weights exchanged are seen."""

from __future__ import annotations

import pytest
import torch
from spec_plugin_conformance.places import missing, place
from torch import Tensor

from draft_training import row_digests

H, HEADS = 8, {"q": 16, "k": 8, "v": 8}


def rows(weights: dict[str, Tensor]) -> dict[str, list[str]]:
    return {name: row_digests(tensor) for name, tensor in weights.items()}


def checkpoint(experts: int = 0) -> dict[str, Tensor]:
    """Two layers as Hugging Face names them; with attention biases."""
    draw = torch.Generator().manual_seed(0)
    found = {"model.embed_tokens.weight": torch.randn(24, H, generator=draw), "model.norm.weight": torch.randn(H)}
    for n in range(2):
        layer = f"model.layers.{n}"
        for name, heads in HEADS.items():
            found[f"{layer}.self_attn.{name}_proj.weight"] = torch.randn(heads, H, generator=draw)
            found[f"{layer}.self_attn.{name}_proj.bias"] = torch.randn(heads, generator=draw)
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            found[f"{layer}.{norm}.weight"] = torch.randn(H, generator=draw)
        for e in range(experts):
            for name in ("gate", "up", "down"):
                found[f"{layer}.mlp.experts.{e}.{name}_proj.weight"] = torch.randn(H, H, generator=draw)
        if not experts:
            for name in ("gate", "up", "down"):
                found[f"{layer}.mlp.{name}_proj.weight"] = torch.randn(H, H, generator=draw)
    return found


def engine(policy: dict[str, Tensor], experts: int = 0) -> dict[str, Tensor]:
    """The same as vLLM packs and names it: queries, keys, values in one; padding behind the vocabulary."""
    found = {
        "language_model.model.embed_tokens.weight": torch.cat([policy["model.embed_tokens.weight"], torch.zeros(8, H)])
    }
    found["language_model.model.norm.weight"] = policy["model.norm.weight"]
    for n in range(2):
        layer, here = f"model.layers.{n}", f"language_model.model.layers.{n}"
        for kind in ("weight", "bias"):
            parts = [policy[f"{layer}.self_attn.{name}_proj.{kind}"] for name in HEADS]
            found[f"{here}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            found[f"{here}.{norm}.weight"] = policy[f"{layer}.{norm}.weight"]
        names = [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]
        both = [torch.cat([policy[f"{m}.gate_proj.weight"], policy[f"{m}.up_proj.weight"]]) for m in names]
        down = [policy[f"{m}.down_proj.weight"] for m in names]
        kept = ("experts.w13_weight", "experts.w2_weight") if experts else ("gate_up_proj.weight", "down_proj.weight")
        for name, tensors in zip(kept, (both, down), strict=True):
            found[f"{here}.mlp.{name}"] = torch.stack(tensors) if experts else tensors[0]
    return found


@pytest.mark.parametrize("experts", [0, 2])
def test_a_policy_that_arrived_is_there(experts: int) -> None:
    policy = checkpoint(experts)
    assert missing(rows(policy), rows(engine(policy, experts))) == []


def test_a_head_that_is_the_embedding_has_no_name_of_its_own() -> None:
    policy = checkpoint()
    held = engine(policy)
    assert missing(rows(policy | {"lm_head.weight": policy["model.embed_tokens.weight"]}), rows(held)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("layers.0.input_layernorm", "layers.0.post_attention_layernorm"),
        ("layers.0.input_layernorm", "layers.1.input_layernorm"),
        ("layers.1.self_attn.q_norm", "layers.1.self_attn.k_norm"),
        ("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"),
        ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"),
        ("layers.0.mlp.down_proj", "layers.1.mlp.down_proj"),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.down_proj"),
    ],
)
def test_two_weights_of_one_shape_that_were_exchanged_are_named(one: str, other: str) -> None:
    policy = checkpoint()
    a, b = f"model.{one}.weight", f"model.{other}.weight"
    held = engine({**policy, a: policy[b], b: policy[a]})
    found = missing(rows(policy), rows(held))
    assert {a, b} <= set(found)
    assert len(found) == len(set(found))


def test_a_row_that_is_another_one_is_seen_wherever_it_is() -> None:
    policy = checkpoint()
    for name, tensor in policy.items():
        wrong = tensor.clone()
        wrong.view(-1)[-1] += 1e-6
        assert name in missing(rows({**policy, name: wrong}), rows(engine(policy)))


def test_a_name_is_its_place_from_the_layer_on() -> None:
    assert place("model.language_model.layers.3.mlp.up_proj.weight") == "layers.3.mlp.up_proj.weight"
    assert place("model.embed_tokens.weight") == "embed_tokens.weight"
