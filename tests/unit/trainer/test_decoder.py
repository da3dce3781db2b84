"""find_decoder and the two shared tensors: found by looking, in whatever a trainer wraps the policy in, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spec_plugin_conformance import tiny
from spec_plugin_conformance.targets import tiny_targets
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from spec_plugin.plan.engine_class import engine_class
from spec_plugin.trainer.decoder import find_decoder, load_policy, shared_with_draft, text_sizes, unwrapped
from spec_plugin.trainer.harvest import harvested, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.taps import Taps

ROOMS = tiny_targets()
V, H, L = 11, 4, 3


def policy(family: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny.tiny_config(family)
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if ROOMS[family].more else AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", sorted(ROOMS))
def test_of_every_family_the_states_are_those_that_make_its_logits(family: str) -> None:
    model, documents = policy(family), [torch.randint(6, tiny.VOCAB, (n,)) for n in (5, 9)]
    decoder = find_decoder(model)
    assert len(decoder.layers) == 8 and decoder.embed is model.get_input_embeddings()
    taps = Taps.of(decoder, (2, 4, 5))
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    attention = (torch.arange(9)[None] < torch.tensor([[5], [9]])).long()
    with taps.attached(), torch.no_grad():
        out = model(input_ids=padded, attention_mask=attention, use_cache=False)
    hidden = harvested(taps, (documents, responses_at_the_end(documents, (1, 1))), HarvestPlan(100))
    assert hidden is not None and hidden.aux.shape == (14, 3 * tiny.HIDDEN)
    logits = hidden.last @ model.get_output_embeddings().weight.T
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    torch.testing.assert_close(logits, torch.cat([out.logits[0, :5], out.logits[1]]))


@pytest.mark.parametrize("family", sorted(ROOMS))
def test_a_familys_room_names_the_class_that_vllm_would_take_and_that_takes_drafts(family: str) -> None:
    found = engine_class({"architectures": [type(policy(family)).__name__]})
    assert found is not None and found.name == ROOMS[family].engine_class and found.hands_out_states


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl"])
def test_a_decoder_is_found_inside_lora_and_activation_checkpointing(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = policy(family)
    plain = find_decoder(model)
    for i, layer in enumerate(plain.layers):
        plain.layers[i] = checkpoint_wrapper(layer)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    found = find_decoder(wrapped)
    assert unwrapped(wrapped) is model and found.norm is plain.norm
    assert all(a is b for a, b in zip(found.layers, plain.layers, strict=True))


class Stack(nn.Module):
    def __init__(self, norms: int = 1, layers: int = L, vocab: int = V) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, H)
        self.blocks = nn.ModuleList(nn.Linear(H, H) for _ in range(layers))
        self.norms_of_mine = nn.Identity()
        for i in range(norms):
            self.add_module(f"norm{i}", nn.LayerNorm(H))


class Whole(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=V, num_hidden_layers=L)
        for name, part in parts.items():
            self.add_module(name, part)


def test_names_do_not_matter_and_another_stack_of_other_sizes_neither() -> None:
    found = find_decoder(Whole(eyes=Stack(layers=2), ears=Stack(vocab=3), tongue=Stack()))
    assert found.place == "tongue" and len(found.layers) == L


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Whole(a=Stack(norms=2)), "found none"),
        (Whole(a=Stack(norms=0)), "found none"),
        (Whole(a=Stack(layers=2)), "found none"),
        (Whole(a=Stack(), b=Stack()), r"found 2 of them \(a, b\)"),
    ],
)
def test_what_is_ambiguous_or_missing_is_refused_in_a_sentence(model: nn.Module, said: str) -> None:
    with pytest.raises(ValueError, match=f"Whole: looked for .* {said}"):
        find_decoder(model)


@pytest.mark.parametrize(
    ("name", "shape", "which"),
    [
        ("model.embed_tokens.weight", (V, H), "embed"),
        ("model.language_model.embed_tokens.weight", (V + 2, H), "embed"),
        ("language_model.model.lm_head.weight", (V, H), "head"),
        ("transformer.wte.weight", (V, H), "embed"),
        ("model.visual.pos_embed.weight", (V, H), None),
        ("model.embed_tokens_per_layer.weight", (V, 3 * H), None),
        ("model.embed_tokens.weight", (V, 3 * H), None),
        ("model.embed_tokens.weight", (V - 1, H), None),
        ("lm_head.bias", (V,), None),
        ("model.layers.0.mlp.down_proj.weight", (V, H), None),
    ],
)
def test_the_shared_tensors_are_told_by_name_and_size(name: str, shape: tuple[int, ...], which: str | None) -> None:
    assert shared_with_draft(name, shape, (V, H)) == which


def test_every_familys_checkpoint_has_one_embedding_and_one_head(tmp_path: Path) -> None:
    for family in sorted(ROOMS):
        model = policy(family)
        sizes = text_sizes(model.config.to_dict())
        found = [shared_with_draft(n, p.shape, sizes) for n, p in model.named_parameters()]
        assert sorted(f for f in found if f) == ["embed", "head"], family


def test_a_policy_of_parts_is_loaded_with_all_of_them(tmp_path: Path) -> None:
    for family in ("qwen3", "mistral3"):
        policy(family).save_pretrained(tmp_path / family)
        again = load_policy(tmp_path / family, torch.float32)
        assert type(again) is type(policy(family)) and not again.training
