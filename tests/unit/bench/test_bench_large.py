"""The large model of the GPU recipe computes what the small one computes."""

from __future__ import annotations

import math

import pytest
import torch
from spec_plugin_conformance import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings, load_draft, save_draft
from examples.bench import large
from examples.bench.workload import harvest

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


def test_in_the_dtype_of_a_card_the_most_likely_tokens_are_the_same(both, tmp_path):
    small, _ = both
    big = large.embedded_target(small, SHAPE, "bfloat16", tmp_path)
    ids = torch.randint(0, tiny.VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    expected, found = logits(small, ids).argmax(-1), logits(big, ids)[..., : tiny.VOCAB].float().argmax(-1)
    assert (found == expected).float().mean() > 0.9


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


@pytest.fixture(scope="module")
def drafts(both, tmp_path_factory):
    """A small draft that is sure of what it says, and the same in the large shape."""
    folder = tmp_path_factory.mktemp("drafts")
    hf = AutoModelForCausalLM.from_pretrained(both[0]).config.to_dict()
    config = DraftConfig.from_target(hf, aux_layers=(1, 2, 3))
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=3)
    with torch.no_grad():
        for name, value in trainer.draft.named_parameters():
            value.uniform_(0.5, 1.5) if "norm" in name else value.mul_(8)
    save_draft(folder / "draft", config, trainer.engine_tensors())
    patch = pytest.MonkeyPatch()
    patch.setattr(large, "CACHE", folder)
    yield folder / "draft", large.embedded_draft(folder / "draft", *both, "float32")
    patch.undo()


def drafted(target, draft, ids, steps):
    """Logits [steps, N, V] that the draft computes from the target's hidden states."""
    model = AutoModelForCausalLM.from_pretrained(target)
    config, tensors = load_draft(draft)
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=0, tensors=tensors)
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer][0] for layer in config.aux_layers], dim=-1)
        following = torch.stack([ids.roll(-1 - j) for j in range(steps)])
        embed, head = model.get_input_embeddings().weight, model.lm_head.weight
        found = trainer.draft.unroll(aux, following, (len(ids),), embed, steps)
        return torch.stack([normed @ head.T for normed in found])


def test_the_large_draft_computes_what_the_small_one_does_in_every_step(both, drafts):
    ids = torch.randint(0, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    small, big = (drafted(target, draft, ids, steps=3) for target, draft in zip(both, drafts, strict=True))
    assert small.std() > 0.1 and big.shape[-1] == 400
    assert torch.allclose(big[..., : tiny.VOCAB], small, atol=5e-4 * float(small.abs().max()))
    assert big[..., tiny.VOCAB :].max() < small.min(-1).values.max()


def test_the_large_draft_has_the_shape_of_one_for_the_large_target_and_reads_the_same_layers(both, drafts):
    hf = AutoModelForCausalLM.from_pretrained(both[1]).config.to_dict()
    config, tensors = load_draft(drafts[1], hf)
    assert config == DraftConfig.from_target(hf, aux_layers=(1, 2, 3))
    assert sum(t.numel() for t in tensors.values()) == config.parameters


def test_a_newborn_draft_can_learn_a_policy_that_has_a_constant_of_its_own(tmp_path):
    """With the tiny constant of the others each random number in its dimension is a logit of millions."""
    small = tiny.make_target(tmp_path / "small")
    tiny.go_on(small)
    big = large.embedded_target(small, SHAPE, "float32", tmp_path, constant=tiny.HIDDEN - 1)
    ids = torch.randint(0, tiny.VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    expected, found = logits(small, ids), logits(big, ids)
    assert torch.allclose(found[..., : tiny.VOCAB], expected, atol=2e-4 * float(expected.abs().max()))
    assert float(found.softmax(-1)[..., tiny.VOCAB :].sum(-1).max()) < 1e-9
    config = DraftConfig.from_target(AutoConfig.from_pretrained(big).to_dict())
    trainer = DraftTrainer(config, TrainSettings(ttt_steps=1), device="cpu", seed=0)
    model = AutoModelForCausalLM.from_pretrained(big)
    trainer.update_policy(model.get_input_embeddings().weight, model.get_output_embeddings().weight, 0)
    buffer = HiddenBuffer(1 << 16, 1 << 30, 0)
    for document in harvest(model, [([row[0]], row[1:]) for row in ids.tolist()], config.aux_layers):
        buffer.add(document)
    report = trainer.train_slice(buffer, math.inf, 1)
    assert report.loss < 20.0  # nats; millions otherwise
