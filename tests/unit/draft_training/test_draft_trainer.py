from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from builders.drafts import SETTINGS, make_buffer, make_document, make_policy, make_trainer, weights

from draft_training import (
    Document,
    DraftConfigError,
    DraftTrainer,
    HiddenBuffer,
    TrainSettings,
    digest,
)


def test_training_lowers_the_loss_and_counts_its_steps(tiny):
    t, b = make_trainer(tiny), make_buffer()
    first = t.train_slice(b, 60, 5)
    last = [t.train_slice(b, 60, 15) for _ in range(4)][-1]
    assert last.loss < 0.8 * first.loss and t.draft_version == 65 and last.steps == 15
    assert len(last.chances) <= 2 and 1.0 <= last.acceptance_length <= 3.0


def test_training_leaves_the_global_rng_untouched(tiny, pruned):
    before = torch.get_rng_state(), random.getstate()
    for config in (tiny, pruned):
        t = make_trainer(config)
        t.train_slice(make_buffer(), 60, 2)
        t.evaluate([make_document(20, 5)])
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_training_works_in_any_mode_of_the_caller_and_restores_it(tiny):
    plain = make_trainer(tiny)
    plain.train_slice(make_buffer(), 60, 2)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with mode():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            t = make_trainer(tiny)
            t.train_slice(make_buffer(), 60, 2)
            assert before == (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
            )
        assert weights(t) == weights(plain)


def test_the_default_dtype_of_the_caller_does_not_matter(tiny):
    plain = make_trainer(tiny)
    plain.train_slice(make_buffer(), 60, 2)
    b, policy = make_buffer(), make_policy()
    torch.set_default_dtype(torch.bfloat16)
    try:
        t = DraftTrainer(tiny, SETTINGS, device="cpu", seed=3)
        t.update_policy(*policy, 1)
        t.train_slice(b, 60, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights(t) == weights(plain)


def test_the_policys_tensors_are_copied_and_never_changed(tiny, pruned):
    for config in (tiny, pruned):
        embed, head = make_policy()
        embed.requires_grad_(), head.requires_grad_()
        before = digest({"e": embed, "h": head})
        t = DraftTrainer(config, SETTINGS, device="cpu", seed=0)
        t.update_policy(embed, head, 4)
        t.train_slice(make_buffer(), 60, 3)
        assert digest({"e": embed, "h": head}) == before and embed.grad is None and head.grad is None
        assert t.policy_version == 4
        owned = {p.data_ptr() for p in t.draft.parameters()}
        assert embed.data_ptr() not in owned and head.data_ptr() not in owned


def test_tied_policy_tensors_are_kept_once(tiny):
    t, (embed, _) = make_trainer(tiny), make_policy()
    t.update_policy(embed, embed, 2)
    assert t._lm_head is t._embed
    t.update_policy(*make_policy(), 3)
    assert t._lm_head is not t._embed and torch.equal(t._lm_head, make_policy()[1])


def test_a_half_precision_policy_is_widened_on_a_cpu(tiny):
    t, (embed, head) = make_trainer(tiny), make_policy()
    t.update_policy(embed.bfloat16(), head.bfloat16(), 2)
    assert t._embed.dtype == t._lm_head.dtype == torch.float32 and torch.equal(t._embed, embed.bfloat16().float())
    assert t.train_slice(make_buffer(), 60, 1).steps == 1


def test_training_before_the_policy_is_known_is_an_error(tiny):
    with pytest.raises(RuntimeError, match="update_policy"):
        DraftTrainer(tiny, SETTINGS, device="cpu", seed=0).train_slice(make_buffer(), 60, 1)


def test_a_policy_of_another_shape_is_refused(tiny):
    with pytest.raises(DraftConfigError, match="embed"):
        make_trainer(tiny).update_policy(torch.zeros(41, 16), torch.zeros(41, 16), 1)


def test_same_seed_same_draft(tiny):
    a, b, c = make_trainer(tiny), make_trainer(tiny), make_trainer(tiny, seed=4)
    assert weights(a) == weights(b) != weights(c)
    a.train_slice(make_buffer(), 60, 3), b.train_slice(make_buffer(), 60, 3)
    assert weights(a) == weights(b)


def test_a_slice_stops_before_the_step_that_would_overrun(tiny, monkeypatch):
    t, b = make_trainer(tiny), make_buffer()
    real, clock = t._step, [0.0]  # a clock of our own: that of a busy machine jumps

    def step(docs):
        clock[0] += 0.05
        return real(docs)

    monkeypatch.setattr(t, "_step", step)
    monkeypatch.setattr("draft_training.trainer.time.perf_counter", lambda: clock[0])
    t.train_slice(b, 60, 1)
    began = clock[0]
    report = t.train_slice(b, 0.31, 100)
    assert report.steps == 6 and clock[0] - began <= 0.31
    assert t.train_slice(b, 0.0, 100).steps == 0


def test_a_budget_below_the_known_cost_trains_nothing_yet_one_slow_step_does_not_end_training(tiny):
    t, b = make_trainer(tiny), make_buffer()
    t._step_seconds = 4.0
    assert t.train_slice(b, 2.5, 5).steps == 0
    assert t.train_slice(b, 2.5, 5).steps > 0


def test_an_empty_buffer_is_no_error(tiny):
    report = make_trainer(tiny).train_slice(HiddenBuffer(10, 1000, 0), 60, 5)
    assert (report.steps, report.tokens, report.acceptance_length, report.loss) == (0, 0, 1.0, 0.0)


def test_a_step_that_is_not_finite_is_skipped_and_leaves_everything_as_it_was(tiny):
    t, b = make_trainer(tiny), make_buffer()
    t.train_slice(b, 60, 2)
    before = weights(t), t.draft_version, digest(t._optimizer.state())
    embed, head = make_policy()
    head[0, 0] = float("nan")
    t.update_policy(embed, head, 2)
    report = t.train_slice(b, 60, 3)
    after = weights(t), t.draft_version, digest(t._optimizer.state())
    assert (report.steps, report.skipped) == (0, 3) and after == before
    t.update_policy(*make_policy(), 3)
    assert t.train_slice(b, 60, 1).steps == 1


def test_evaluation_changes_nothing_and_agrees_with_itself_in_any_packing(tiny):
    t = make_trainer(tiny)
    t.train_slice(make_buffer(), 60, 3)
    before, docs = weights(t), [make_document(15 + i, i) for i in range(6)]
    whole = t.evaluate(docs, steps=3)
    t.settings = TrainSettings(tokens_per_step=20, ttt_steps=2)
    single = t.evaluate(docs, steps=3)
    assert whole.chances == single.chances and whole.rounds == single.rounds > 0
    assert weights(t) == before and t.draft_version == 3


def test_engine_tensors_never_hold_what_the_target_owns(tiny, pruned):
    assert not {n for n in make_trainer(tiny).engine_tensors() if "embed" in n or "lm_head" in n or "d2t" in n}
    t = make_trainer(pruned)
    pushed = t.engine_tensors(torch.bfloat16)
    assert {"lm_head.weight", "d2t", "t2d"} <= set(pushed) and not any("embed" in n for n in pushed)
    assert pushed["d2t"].dtype == torch.int64 and pushed["t2d"].dtype == torch.bool
    assert pushed["fc.weight"].dtype == torch.bfloat16
    pushed["fc.weight"].zero_()
    assert t.draft.fc.weight.abs().sum() > 0


def test_a_pruned_head_is_frozen_and_follows_the_policy(pruned):
    t = make_trainer(pruned)
    t.train_slice(make_buffer(), 60, 2)
    embed, head = make_policy(seed=11)
    t.update_policy(embed, head, 2)
    assert torch.equal(t.draft.lm_head.weight, head[t.draft.vocabulary()])
    t.train_slice(make_buffer(), 60, 2)
    assert torch.equal(t.draft.lm_head.weight, head[t.draft.vocabulary()])


def test_the_vocabulary_is_the_most_frequent_tokens(pruned):
    t = make_trainer(pruned)
    counts = torch.zeros(40, dtype=torch.int64)
    counts[torch.tensor([39, 3, 17, 20])] = torch.tensor([5, 9, 7, 1])
    t.select_vocabulary(counts)
    ids = t.draft.vocabulary()
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 17, 20, 39]
    assert t.draft.t2d.nonzero().squeeze(1).tolist() == ids.tolist()
    assert torch.equal(t.draft.lm_head.weight, make_policy()[1][ids])
    assert t.train_slice(make_buffer(), 60, 2).steps == 2
    counts = torch.zeros(40, dtype=torch.int64)
    counts[30] = 1
    t.select_vocabulary(counts)
    assert t.draft.vocabulary().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 17, 20, 30], (
        "those that are in it stay before others come"
    )
    assert torch.equal(t.draft.lm_head.weight, make_policy()[1][t.draft.vocabulary()])


def test_the_public_api_is_what_others_build_on():
    import draft_training

    assert set(draft_training.__all__) >= {
        "DraftConfig", "DraftConfigError", "Eagle3Draft", "ttt_loss", "Document", "HiddenBuffer", "TrainSettings",
        "DraftTrainer", "SliceReport", "digest", "save_draft", "load_draft", "validate_draft",
    }  # fmt: skip
    assert draft_training.SliceReport.__dataclass_params__.frozen


def test_a_draft_that_turned_out_to_know_nothing_learns_at_a_newborns_rates(tiny, tmp_path):
    """Else it would learn at the floor, 0.15 of the rate, where a newborn has 0.77 of it."""
    settings = TrainSettings(tokens_per_step=60, warmup_steps=2, lr=3e-3, ttt_steps=2)
    newborn = make_trainer(tiny, settings)
    given = make_trainer(tiny, settings, tensors=newborn.engine_tensors())
    rates = [[t.schedule.rate(step) for step in (0, 5, 20, 100)] for t in (newborn, given)]
    assert rates[1][2] == settings.lr_floor < rates[0][2]
    given.schedule.newborn = True
    assert [given.schedule.rate(step) for step in (0, 5, 20, 100)] == rates[0]
    given.save(tmp_path / "draft")
    resumed = make_trainer(tiny, settings, tensors=newborn.engine_tensors())
    resumed.load(tmp_path / "draft")
    assert resumed.schedule.rate(20) == rates[0][2], "also after a resume"


@pytest.mark.parametrize(
    ("mask", "share", "taught"),
    [
        ("......##", 1.0, "....####"),
        ("......##", 0.5, ".....###"),
        ("......##", 0.4, "......##"),
        ("..######", 1.0, "########"),
        (".##...#..", 1.0, ".######.."),  # what was read behind the last sampled token is not what a draft continues
        (".##...#..", 0.34, ".##..##.."),
        ("........", 1.0, "........"),
        ("......##", 0.0, "......##"),
    ],
)
def test_the_latest_tokens_that_were_read_teach_too_as_many_as_were_sampled(mask, share, taught):
    document = replace(make_document(len(mask), 0), loss_mask=torch.tensor([c == "#" for c in mask]))
    found = document.with_context(share)
    assert "".join(".#"[int(on)] for on in found.loss_mask) == taught
    assert found.input_ids is document.input_ids and "".join(".#"[int(on)] for on in document.loss_mask) == mask


def test_prompts_teach_a_newborn_draft_as_long_as_it_is_young_and_no_given_one(tiny, monkeypatch):
    settings = replace(SETTINGS, decay_steps=1.0, lr_floor=0.5)  # young for three steps
    for tensors, taught in ((None, [1.0, 1.0, 1.0, 0.0, 0.0]), (make_trainer(tiny).engine_tensors(), [0.0] * 5)):
        shares: list[float] = []

        def watched(document, share, shares=shares):
            shares.append(share)
            return document

        monkeypatch.setattr(Document, "with_context", watched)
        t, b = make_trainer(tiny, settings, tensors=tensors), make_buffer(documents=1)
        t.train_slice(b, 60, 5)
        assert shares == taught
        t.evaluate([make_document(20, 5)])
        assert len(shares) == 5, "acceptance is that of sampled tokens"
