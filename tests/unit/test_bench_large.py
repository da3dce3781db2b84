"""The large model of the GPU recipe computes what the small one computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.bench import large
from spec_plugin.conformance import tiny

SHAPE = large.Shape(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=400,
)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    small = tiny.make_target(folder / "small")
    model = AutoModelForCausalLM.from_pretrained(small)
    with torch.no_grad():  # nothing that is one or zero by chance
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif "layers" in name:
                value.mul_(8)
    model.save_pretrained(small)
    patch = pytest.MonkeyPatch()
    patch.setattr(large, "CACHE", folder)
    yield small, large.embedded_target(small, SHAPE, "float32")
    patch.undo()


def logits(folder, ids):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(ids).logits


def test_the_logits_are_those_of_the_small_model(both):
    small, big = both
    ids = torch.randint(0, tiny.VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    expected, found = logits(small, ids), logits(big, ids)
    assert expected.std() > 0.1
    assert torch.allclose(found[..., : tiny.VOCAB], expected, atol=2e-4 * float(expected.abs().max()))


def test_tokens_that_the_small_model_does_not_have_are_never_sampled(both):
    found = logits(both[1], torch.arange(40)[None])
    assert found[..., tiny.VOCAB :].max() < found[..., : tiny.VOCAB].max(-1).values.min() - 30


def test_the_shape_is_the_one_that_was_asked_for(both):
    model = AutoModelForCausalLM.from_pretrained(both[1])
    assert model.config.num_hidden_layers == 10 and model.lm_head.weight.shape == (400, 256)
    assert model.model.layers[9].self_attn.q_proj.weight.shape == (512, 256)


def test_what_does_not_fit_is_named(both):
    model = AutoModelForCausalLM.from_pretrained(both[0])
    with pytest.raises(ValueError, match="hidden size, query heads of a key head"):
        large.Embedding(model.config, large.Shape(hidden_size=64, num_attention_heads=8, num_key_value_heads=8))
