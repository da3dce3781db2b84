"""What the draft trainer shares with nobody: the policy's memory, the tensors it has sent; and what bounds its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.drafts import SETTINGS, make_buffer, make_document, make_policy, make_trainer, weights

from draft_training import DraftTrainer
from draft_training.batch import pack
from draft_training.config import default_aux_layers, vllm_aux_layers
from draft_training.errors import DraftConfigError
from draft_training.loss import replay


def test_law_4_the_trainers_embedding_and_head_are_not_the_policys_memory(tiny):
    """A trainer updates its parameters in place, while the draft still learns from those of the last sync."""
    embed, head = make_policy()
    t = DraftTrainer(tiny, SETTINGS, device="cpu", seed=3)
    t.update_policy(embed, head, 1)
    with torch.no_grad():
        embed.fill_(torch.nan), head.fill_(torch.nan)
    report = t.train_slice(make_buffer(), 60, 2)
    assert report.steps == 2 and report.skipped == 0
    plain = make_trainer(tiny)
    plain.train_slice(make_buffer(), 60, 2)
    assert weights(t) == weights(plain)


def test_a_tied_policy_is_copied_too(tiny):
    embed, _ = make_policy()
    t = DraftTrainer(tiny, SETTINGS, device="cpu", seed=3)
    t.update_policy(embed, embed, 1)
    with torch.no_grad():
        embed.fill_(torch.nan)
    assert t.train_slice(make_buffer(), 60, 1).steps == 1


def moved(config, **changes) -> dict[str, torch.Tensor]:
    """How far the first optimizer step moves each parameter."""
    t = make_trainer(config, replace(SETTINGS, **changes))
    before = {name: p.detach().clone() for name, p in t.draft.named_parameters()}
    assert t.train_slice(make_buffer(), 60, 1).steps == 1
    return {name: (p.detach() - before[name]).abs().max() for name, p in t.draft.named_parameters()}


def test_the_first_steps_are_a_part_of_the_full_rate(tiny):
    at_once, warm = moved(tiny, warmup_steps=1), moved(tiny, warmup_steps=10)
    assert all(torch.isclose(warm[name], at_once[name] / 10, rtol=1e-3) for name in at_once)


def test_the_drafts_own_gradients_are_clipped(tiny):
    """Muon and AdamW do not see the size of a gradient, but AdamW's floor does: norms stand still where it is tiny."""
    free, clipped = moved(tiny), moved(tiny, grad_clip=1e-12)
    norms = [name for name in free if name.endswith("norm.weight")]
    assert norms and all(clipped[name] < 0.01 * free[name] for name in norms)


def test_a_step_whose_gradients_are_not_finite_is_skipped_although_its_loss_is(tiny):
    t = make_trainer(tiny)
    before = weights(t)
    next(t.draft.parameters()).register_hook(lambda grad: grad * torch.inf)
    report = t.train_slice(make_buffer(), 60, 1)
    assert (report.steps, report.skipped, t.draft_version) == (0, 1, 0) and weights(t) == before


def test_law_5_tensors_that_were_sent_do_not_change_while_the_draft_is_trained_on(tiny):
    t = make_trainer(tiny)
    sent = t.engine_tensors()
    before = {name: tensor.clone() for name, tensor in sent.items()}
    t.train_slice(make_buffer(), 60, 2)
    assert all(torch.equal(sent[name], before[name]) for name in sent)


def test_every_fourth_step_is_unrolled_as_far_as_the_engine_drafts_with_fewer_tokens(tiny, tmp_path, monkeypatch):
    settings = replace(SETTINGS, first_steps=2, ttt_steps=4, tokens_per_step=60)
    seen: list[tuple[int, int]] = []
    loss = DraftTrainer._loss

    def watched(self, batch, embed, lm_head, counts):
        seen.append((counts.numel(), len(batch)))
        return loss(self, batch, embed, lm_head, counts)

    monkeypatch.setattr(DraftTrainer, "_loss", watched)
    t = make_trainer(tiny, settings)
    report = t.train_slice(make_buffer(), 60, 6)
    assert [steps for steps, _ in seen] == [2, 2, 2, 4, 2, 2]
    assert all(tokens <= 60 * 2 // steps for steps, tokens in seen) and max(tokens for _, tokens in seen) > 30
    assert len(report.chances) <= 2 and report.loss > 0.0, "of the first two steps, which all optimizer steps have"
    t.save(tmp_path / "draft")
    resumed = make_trainer(tiny, settings)
    resumed.load(tmp_path / "draft")
    resumed.train_slice(make_buffer(), 60, 2)
    assert [steps for steps, _ in seen[6:]] == [2, 4], "it goes on where it was"


def test_a_draft_is_never_unrolled_further_than_the_engine_drafts(tiny):
    t = make_trainer(tiny, replace(SETTINGS, first_steps=3, ttt_steps=2))
    assert {t.schedule.unroll(step) for step in range(8)} == {2} and t.schedule.tokens(3) == SETTINGS.tokens_per_step


def test_more_unrolled_steps_than_sampled_tokens_replay_no_round():
    short = torch.ones(8, 3, dtype=torch.bool)
    accepted, rounds = replay(short, short, torch.arange(3))
    assert float(rounds) == 0.0 and not accepted.any()


def test_the_last_token_of_a_document_teaches_nothing_of_the_next_one():
    first, second = make_document(5, 0, prompt=0), make_document(4, 1, prompt=0)
    assert pack([first, second]).rows.tolist() == [1, 2, 3, 6, 7]


def test_a_round_that_reaches_beyond_what_was_sampled_counts_neither_for_the_draft_nor_against_it():
    """Its first token hits, but nobody knows what the second would have done."""
    valid = torch.tensor([[True, True, True], [False, True, True]])
    match = torch.tensor([[True, False, True], [False, False, False]])
    accepted, rounds = replay(match, valid, torch.tensor([5, 6, 7]))
    assert (accepted.tolist(), float(rounds)) == ([1.0, 0.0], 1.0)


def test_a_newborn_draft_reads_the_layers_that_vllms_drafts_do():
    assert (
        default_aux_layers(36) == (2, 18, 33)
        and default_aux_layers(8) == (2, 4, 5)
        and default_aux_layers(7) == (2, 3, 4)
    )


@pytest.mark.parametrize(
    ("layers", "ids"), [(6, (1, 3, 5)), (5, (1, 2, 4)), (4, (1, 2, 3)), (3, (1, 2)), (2, (1,)), (1, (0,))]
)
def test_of_a_shallow_target_a_newborn_draft_reads_layers_that_are_distinct(layers, ids):
    assert default_aux_layers(layers) == ids
    with pytest.raises(DraftConfigError, match=f"collide in a target of {layers} layers: name them as"):
        vllm_aux_layers(layers)
