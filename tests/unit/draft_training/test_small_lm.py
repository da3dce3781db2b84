"""A small language model as a draft: distilled from last states alone, written and read as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draft_training import Document, DraftConfigError, DraftTrainer, HiddenBuffer, TrainSettings, digest, pack
from draft_training.small_lm import SmallLmShape
from draft_training.small_lm_module import SmallLmKind, load_small_lm

V, H = 48, 40
TARGET = {"vocab_size": V, "hidden_size": H, "max_position_embeddings": 128}
SETTINGS = TrainSettings(ttt_steps=1, first_steps=1, tokens_per_step=256)


def teacher() -> torch.Tensor:
    """[V, H] a head under which the state of token t says t + 1, mostly."""
    return torch.linalg.qr(torch.randn(V, V, generator=torch.Generator().manual_seed(0)))[0][:, :H].contiguous()


def document(seed: int, head: torch.Tensor, n: int = 40) -> Document:
    """Tokens that count upwards from somewhere; the last states agree."""
    ids = (torch.arange(n) + seed * 7) % V
    last = 12.0 * head[(ids + 1) % V]
    return Document(ids, torch.zeros(n, 0), last, torch.arange(n) >= 4, policy_version=0)


def trained(steps: int, shape: SmallLmShape | None = None) -> DraftTrainer:
    head = teacher()
    trainer = DraftTrainer(shape or SmallLmShape.from_target(TARGET), SETTINGS, device="cpu", seed=0)
    trainer.update_policy(head, head, 0)
    buffer = HiddenBuffer(10_000, 1 << 30, seed=0)
    for seed in range(12):
        buffer.add(document(seed, head))
    trainer.train_slice(buffer, float("inf"), steps)
    return trainer


def test_it_learns_from_tokens_and_last_states_alone() -> None:
    head = teacher()
    held_out = [document(99, head)]
    before, after = trained(0).evaluate(held_out, 5), trained(60).evaluate(held_out, 5)
    assert before.acceptance_length < 1.5
    assert after.acceptance_length > 5.5, "five drafted tokens, replayed, though only one step is unrolled in training"


def test_what_is_written_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    trainer = trained(3)
    trainer.save(tmp_path / "t")
    other = trained(0)
    other.load(tmp_path / "t")
    assert digest(other.engine_tensors()) == digest(trainer.engine_tensors()) and other.draft_version == 3
    shape, tensors = load_small_lm(tmp_path / "t" / "draft", TARGET)
    assert digest(tensors) == digest(trainer.engine_tensors())
    assert shape.parameters == sum(t.numel() for t in tensors.values())


def test_a_tied_head_is_named_once() -> None:
    shape = SmallLmShape.from_target(TARGET)
    tied = SmallLmShape(H, {**shape.hf, "tie_word_embeddings": True})
    trainer = trained(2, tied)
    names = set(trainer.engine_tensors())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert tied.parameters == sum(t.numel() for t in trainer.engine_tensors().values())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab_size": V + 1}, "target's tokenizer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "cannot be refreshed"),
        ({"model_type": "gpt2"}, "cannot be a small draft"),
        ({"num_hidden_layers": 3}, "do not match"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    import json

    trained(0).save(tmp_path / "t")
    file = tmp_path / "t" / "draft" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DraftConfigError, match=why):
        load_small_lm(file.parent, TARGET)


def test_each_prediction_comes_from_the_state_of_the_token_before() -> None:
    """Row t of step j predicts token t + 2 + j: the model must have read up to t + 1 + j, of this document only."""
    trainer = trained(0)
    documents = [document(1, teacher(), 9), document(5, teacher(), 14)]
    with torch.no_grad():
        states = list(trainer.draft.states(pack(documents), torch.empty(0), 3))
        alone = trainer.draft.lm.model(documents[1].input_ids[None]).last_hidden_state[0]
    for j, state in enumerate(states):
        torch.testing.assert_close(state[9:][: 14 - 1 - j], alone[1 + j :])


def test_a_tied_head_that_a_checkpoint_names_all_the_same_is_left_out(tmp_path: Path) -> None:
    made = SmallLmShape.from_target(TARGET)
    tied = SmallLmShape(H, {**made.hf, "tie_word_embeddings": True})
    tensors = trained(0, tied).engine_tensors()
    SmallLmKind(tied).write(tmp_path, tensors)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert digest(SmallLmKind(tied).tensors_of(tmp_path)) == digest(tensors)
